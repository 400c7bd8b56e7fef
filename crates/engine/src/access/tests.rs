//! What is recognized, by itself: the life of tokens is in `crate::tests::access`.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const OWN: &str = "bvk_0123456789abcdef";

fn access() -> Access {
    Access::new(Some(&Secret::new(OWN.to_owned())))
}

fn row(id: &str, secret: &str, expires_at: Option<Millis>) -> TokenRow {
    TokenRow {
        id: id.to_owned(),
        name: format!("n{id}"),
        hash: hex(&hash(secret)),
        grant: Grant::all(),
        made_by: String::new(),
        created_at: 0,
        expires_at,
        revoked_at: None,
        last_used_at: None,
    }
}

fn who(access: &Access, text: &str, now: Millis) -> Option<String> {
    let known = |text: &str| match access.recognize(text, now)? {
        Recognized::Own => Some("own".to_owned()),
        Recognized::Made(known) => Some(known.principal.name.clone()),
    };
    known(text).or_else(|| known(&carried(text)?))
}

fn jwt(header: &Value, claims: &Value) -> String {
    let part = |v: &Value| URL_SAFE_NO_PAD.encode(v.to_string());
    format!("{}.{}.x", part(header), part(claims))
}

#[test]
fn only_the_whole_token_counts() {
    let access = access();
    access.learn(&row("0a", "5ec7e7", Some(100)));
    assert_eq!(who(&access, OWN, 0).as_deref(), Some("own"));
    assert_eq!(who(&access, "bvt_0a_5ec7e7", 99).as_deref(), Some("n0a"));
    let hash = hex(&hash("5ec7e7"));
    for bad in [
        String::new(),
        OWN.to_uppercase(),
        OWN[1..].to_owned(),
        format!("{OWN}x"),
        "bvt_0a_5ec7e8".to_owned(),
        "bvt_0a_".to_owned(),
        "bvt_0a".to_owned(),
        "bvt_0b_5ec7e7".to_owned(),
        "0a_5ec7e7".to_owned(),
        format!("bvt_0a_{hash}"),
        format!("bvt_0b_{}", hex(&[0; 32])),
    ] {
        assert_eq!(who(&access, &bad, 0), None, "{bad}");
    }
    assert_eq!(who(&access, "bvt_0a_5ec7e7", 100), None, "it has expired");
}

#[test]
fn without_a_token_of_its_own_an_engine_lets_nobody_in() {
    for own in [None, Some(Secret::new(String::new()))] {
        let access = Access::new(own.as_ref());
        let empty = jwt(&json!({"alg": "none"}), &json!({"token": ""}));
        for text in ["", "x", &empty] {
            assert_eq!(who(&access, text, 0), None);
        }
    }
}

#[test]
fn a_jwt_counts_only_by_its_token_claim() {
    let access = access();
    access.learn(&row("0a", "5ec7e7", None));
    let none = json!({"alg": "none", "typ": "JWT"});
    let good = jwt(&none, &json!({"owner_id": "t", "token": OWN}));
    assert_eq!(who(&access, &good, 0).as_deref(), Some("own"));
    let made = jwt(&none, &json!({"token": "bvt_0a_5ec7e7"}));
    assert_eq!(who(&access, &made, 0).as_deref(), Some("n0a"));
    for (header, claims) in [
        (&none, json!({"owner_id": "t"})),
        (&none, json!({"token": "other"})),
        (&none, json!({"token": [OWN]})),
        (&none, json!({"token": good})),
        (&none, json!(OWN)),
        (&json!({"alg": "RS256"}), json!({"token": OWN})),
        (&json!({}), json!({"token": OWN})),
    ] {
        assert_eq!(who(&access, &jwt(header, &claims), 0), None, "{header} {claims}");
    }
    for bad in [format!("{good}.y"), good.replace(".x", ""), "a.b.c".to_owned()] {
        assert_eq!(who(&access, &bad, 0), None, "{bad}");
    }
}

#[test]
fn a_damaged_row_lets_nobody_in() {
    let access = access();
    for hash in ["", "00", &"zz".repeat(32), &"é".repeat(32)] {
        access.learn(&TokenRow { hash: hash.to_owned(), ..row("0a", "", None) });
        assert_eq!(who(&access, "bvt_0a_", 0), None, "{hash}");
    }
}

#[test]
fn descendants_are_found_whatever_their_order() {
    let made = |id: &str, by: &str| TokenRow { made_by: by.to_owned(), ..row(id, "x", None) };
    let rows = [made("c", "b"), made("d", ""), made("b", "a"), made("a", ""), made("e", "c")];
    assert_eq!(with_descendants(&rows, "a"), ["a", "b", "c", "e"]);
    assert_eq!(with_descendants(&rows, "d"), ["d"]);
}

#[test]
fn names_are_checked() {
    for good in ["a", "ci.main-2_x", &"a".repeat(64)] {
        assert!(check_name(good).is_ok(), "{good}");
    }
    for bad in ["", "local", "-a", ".a", "a/b", "a b", "é", &"a".repeat(65)] {
        assert!(check_name(bad).is_err(), "{bad}");
    }
}

proptest! {
    #[test]
    fn nothing_else_gets_in(text in "[ -~]{0,60}", tail in "[0-9a-f]{0,64}") {
        let access = access();
        access.learn(&row("0a", "5ec7e7", None));
        prop_assume!(!text.contains(OWN) && tail != "5ec7e7");
        prop_assert_eq!(who(&access, &text, 0), None);
        prop_assert_eq!(who(&access, &format!("bvt_0a_{tail}"), 0), None);
    }
}
