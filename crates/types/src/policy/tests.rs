//! Policies: the grammar, the strictness, and that no secret survives the parser.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::name::Invalid;

fn parse(value: &Value) -> Result<NetworkPolicy, Invalid> {
    let mut minted = 0u64;
    let mut mint = || {
        minted += 1;
        crate::id::ValueId::new(minted, [0; 10])
    };
    NetworkPolicy::parse("networkPolicy", value, &mut mint).map(|draft| draft.policy)
}

fn refused(value: &Value) -> Invalid {
    parse(value).expect_err(&value.to_string())
}

#[test]
fn modes() {
    assert_eq!(parse(&json!({"mode": "allow-all"})), Ok(NetworkPolicy::AllowAll));
    assert_eq!(parse(&json!({"mode": "deny-all"})), Ok(NetworkPolicy::DenyAll));
    for empty in [json!({}), json!({"allow": []}), json!({"allow": {}}), json!({"mode": "custom"})]
    {
        assert_eq!(parse(&empty), Ok(NetworkPolicy::Custom(CustomPolicy::default())), "{empty}");
    }
    for (bad, field) in [
        (json!({"mode": "open"}), "networkPolicy.mode"),
        (json!({"mode": null}), "networkPolicy.mode"),
        (json!({"mode": "allow-all", "allow": ["a.com"]}), "networkPolicy[\"allow\"]"),
        (json!({"mode": "custom", "forwardRules": []}), "networkPolicy[\"forwardRules\"]"),
        (json!({"alow": ["a.com"]}), "networkPolicy[\"alow\"]"),
        (json!([]), "networkPolicy"),
        (json!("allow-all"), "networkPolicy"),
        (json!(null), "networkPolicy"),
        (json!({"allow": null}), "networkPolicy.allow"),
        (json!({"allow": [1]}), "networkPolicy.allow[0]"),
        (json!({"subnets": {"deny": ["10.0.0.0/33"]}}), "networkPolicy.subnets.deny[0]"),
    ] {
        assert_eq!(refused(&bad).field, field, "{bad}");
    }
}

#[test]
fn every_kind_of_rule_reads_back_without_its_secrets() {
    let sent = json!({
        "allow": {
            "API.example.com.": [
                {"match": {"method": ["POST"], "path": {"startsWith": "/v1/"},
                    "queryString": [{"key": {"exact": "k"}, "value": {"regex": "^x"}}],
                    "headers": [{"key": {"exact": "x-team"}}]},
                 "transform": [{"headers": {"Authorization": "Bearer SECRET", "x-a": "SECRET"}},
                               {"headers": {"authorization": "SECRET"}}, {}]},
                {"forwardURL": "https://proxy.example.com:8443/in"},
                {"response": {"statusCode": 403, "body": "no", "contentType": "text/plain",
                    "headers": {"x-why": "policy"}}},
            ],
            "*.example.org": [],
            "*": [],
        },
        "subnets": {"allow": ["1.1.1.1", "fd00::/8"], "deny": ["10.0.0.0/8"]},
    });
    let policy = parse(&sent).unwrap();
    let matcher = &sent["allow"]["API.example.com."][0]["match"];
    assert_eq!(
        policy.read_back(),
        json!({
            "mode": "custom",
            "allowedDomains": ["*", "*.example.org", "api.example.com"],
            "allowedCIDRs": ["1.1.1.1/32", "fd00::/8"],
            "deniedCIDRs": ["10.0.0.0/8"],
            "injectionRules": [{"domain": "api.example.com",
                "headerNames": ["Authorization", "x-a"], "match": matcher,
                "matchDimensions": ["headers", "method", "path", "queryString"]}],
            "forwardRules": [{"domain": "api.example.com",
                "forwardURL": "https://proxy.example.com:8443/in"}],
            "responseRules": [{"domain": "api.example.com", "statusCode": 403}],
        })
    );
    let stored = serde_json::to_string(&policy).unwrap();
    assert!(!stored.contains("SECRET") && !format!("{policy:?}").contains("SECRET"));
    assert_eq!(serde_json::from_str::<NetworkPolicy>(&stored).unwrap(), policy);
}

#[test]
fn the_older_form() {
    let policy = parse(&json!({
        "mode": "custom",
        "allowedDomains": ["a.com", "A.com"],
        "injectionRules": [{"domain": "a.com", "headers": {"k": "SECRET"}}, {"domain": "b.com"}],
        "allowedCIDRs": ["192.0.2.0/24"],
        "deniedCIDRs": ["0.0.0.0/0"],
    }));
    assert_eq!(
        policy.unwrap().read_back(),
        json!({
            "mode": "custom",
            "allowedDomains": ["a.com", "b.com"],
            "allowedCIDRs": ["192.0.2.0/24"],
            "deniedCIDRs": ["0.0.0.0/0"],
            "injectionRules": [{"domain": "a.com", "headerNames": ["k"]},
                {"domain": "b.com", "headerNames": []}],
        })
    );
}

#[test]
fn rules_are_checked() {
    let with = |rule: Value| json!({"allow": {"a.com": [rule]}});
    let rule = "networkPolicy.allow[\"a.com\"][0]";
    for (bad, field) in [
        (json!({}), ""),
        (json!({"transform": [], "forwardURL": "https://x.com"}), ""),
        (json!({"transform": [{"headers": {"a": 1}}]}), ".transform[0].headers[\"a\"]"),
        (json!({"transform": [{"headers": {"a b": "x"}}]}), ".transform[0].headers[\"a b\"]"),
        (json!({"transform": [{"headers": {"a": "x\r\ny"}}]}), ".transform[0].headers[\"a\"]"),
        (json!({"transform": [{"headers": {"A": "1", "a": "2"}}]}), ".transform[0].headers[\"a\"]"),
        (
            json!({"transform": [{"headers": {"Content-Length": "1"}}]}),
            ".transform[0].headers[\"Content-Length\"]",
        ),
        (json!({"transform": [], "match": {"method": []}}), ".match.method"),
        (json!({"transform": [], "match": {"method": ["GET "]}}), ".match.method[0]"),
        (json!({"transform": [], "match": {"path": {}}}), ".match.path"),
        (json!({"transform": [], "match": {"path": {"exact": "a", "regex": "b"}}}), ".match.path"),
        (json!({"transform": [], "match": {"headers": [{}]}}), ".match.headers[0]"),
        (
            json!({"transform": [], "match": {"path": {"regex": "x".repeat(MAX_REGEX + 1)}}}),
            ".match.path.regex",
        ),
        (json!({"forwardURL": "http://x.com"}), ".forwardURL"),
        (json!({"forwardURL": "https://x.com/?a"}), ".forwardURL"),
        (json!({"forwardURL": "https://x.com/#a"}), ".forwardURL"),
        (json!({"forwardURL": "https://u:p@x.com/"}), ".forwardURL"),
        (json!({"forwardURL": "https:///x"}), ".forwardURL"),
        (json!({"forwardURL": "https://x.com:0/"}), ".forwardURL"),
        (json!({"forwardURL": "https://*.com/"}), ".forwardURL"),
        (json!({"response": {"statusCode": 199}}), ".response.statusCode"),
        (json!({"response": {"statusCode": 200.5}}), ".response.statusCode"),
        (json!({"response": {}}), ".response.statusCode"),
        (json!({"response": {"statusCode": 200, "body": "x"}}), ".response"),
        (
            json!({"response": {"statusCode": 204, "body": "x", "contentType": "text/plain"}}),
            ".response.body",
        ),
        (
            json!({"response": {"statusCode": 200, "headers": {"Connection": "x"}}}),
            ".response.headers[\"Connection\"]",
        ),
    ] {
        let fault = refused(&with(bad.clone()));
        assert_eq!(fault.field, format!("{rule}{field}"), "{bad}");
    }
    for good in [
        json!({"forwardURL": "https://[::1]:8443/p"}),
        json!({"forwardURL": "https://127.0.0.1"}),
        json!({"response": {"statusCode": 204}}),
        json!({"transform": [], "match": {}}),
    ] {
        assert!(parse(&with(good.clone())).is_ok(), "{good}");
    }
}

#[test]
fn additions_are_read_and_shown_only_when_they_are_used() {
    let sent = json!({
        "allow": {
            "a.com:8443": [
                {"transform": [{"headers": {"authorization": "Bearer ${secret:gh} SECRET${secret:gh}"}}],
                 "credential": "github", "actor": "user-1", "expiresAt": 1_800_000_000_000u64},
                {"sign": {"aws": {"accessKeyId": "SECRET", "secretAccessKey": "${secret:aws-key}",
                    "region": "eu-west-1"}}},
            ],
            "a.com": [],
            "*:22": [],
        },
        "plainHttp": true,
        "dns": "open",
    });
    let mut minted = 0u64;
    let mut mint = || {
        minted += 1;
        crate::id::ValueId::new(minted, [0; 10])
    };
    let draft = NetworkPolicy::parse("networkPolicy", &sent, &mut mint).unwrap();
    assert_eq!(
        draft.policy.read_back(),
        json!({
            "mode": "custom",
            "allowedDomains": ["*:22", "a.com", "a.com:8443"],
            "injectionRules": [
                {"domain": "a.com:8443", "headerNames": ["authorization"], "secrets": ["gh"],
                 "credential": "github", "actor": "user-1", "expiresAt": 1_800_000_000_000u64},
                {"domain": "a.com:8443", "headerNames": ["authorization"], "sign": "aws",
                 "secrets": ["aws-key"]},
            ],
            "plainHttp": true,
            "dns": "open",
        })
    );
    let values: Vec<&str> = draft.values.values().map(Secret::expose).collect();
    assert_eq!(
        values,
        [
            "Bearer ${secret:gh} SECRET${secret:gh}",
            r#"{"accessKeyId":"SECRET","secretAccessKey":"${secret:aws-key}"}"#
        ]
    );
    for text in [draft.policy.request_form().to_string(), format!("{draft:?}")] {
        assert!(!text.contains("SECRET"), "{text}");
    }
}

#[test]
fn additions_are_checked() {
    for (bad, field) in [
        (json!({"plainHttp": 1}), ".plainHttp"),
        (json!({"dns": true}), ".dns"),
        (json!({"mode": "custom", "dns": "closed"}), ".dns"),
        (json!({"allow": ["a.com:0"]}), ".allow[0]"),
        (json!({"allow": ["a.com:"]}), ".allow[0]"),
        (json!({"allow": ["a.com:080"]}), ".allow[0]"),
        (json!({"allow": ["a.com:65536"]}), ".allow[0]"),
        (json!({"allow": ["1.2.3.4:80"]}), ".allow[0]"),
        (json!({"allow": ["::1"]}), ".allow[0]"),
        (json!({"allow": {"a.com:80": [], "A.com.:80": []}}), ".allow[\"a.com:80\"]"),
    ] {
        assert_eq!(refused(&bad).field, format!("networkPolicy{field}"), "{bad}");
    }
    let with = |rule: Value| json!({"allow": {"a.com": [rule]}});
    let keys = json!({"accessKeyId": "a", "secretAccessKey": "b"});
    for (bad, field) in [
        (json!({"sign": {"aws": keys}, "transform": []}), ""),
        (json!({"sign": {}}), ".sign.aws"),
        (json!({"sign": {"aws": {}}}), ".sign.aws.accessKeyId"),
        (
            json!({"sign": {"aws": {"credentials": "x", "sessionToken": "y"}}}),
            ".sign.aws.sessionToken",
        ),
        (json!({"sign": {"aws": {"credentials": "${secret:"}}}), ".sign.aws.credentials"),
        (json!({"transform": [{"headers": {"a": "${secret:b"}}]}), ".transform[0].headers[\"a\"]"),
        (
            json!({"transform": [{"headers": {"a": "${secret:b c}"}}]}),
            ".transform[0].headers[\"a\"]",
        ),
        (json!({"transform": [], "expiresAt": "tomorrow"}), ".expiresAt"),
        (json!({"transform": [], "expiresAt": -1}), ".expiresAt"),
        (json!({"transform": [], "credential": ""}), ".credential"),
        (json!({"transform": [], "actor": "a\nb"}), ".actor"),
    ] {
        let fault = refused(&with(bad.clone()));
        assert_eq!(fault.field, format!("networkPolicy.allow[\"a.com\"][0]{field}"), "{bad}");
    }
    for good in [
        json!({"sign": {"aws": {"credentials": "${secret:aws}", "service": "s3"}}}),
        json!({"sign": {"aws": {"accessKeyId": "a", "secretAccessKey": "b", "sessionToken": "c"}}}),
    ] {
        assert!(parse(&with(good.clone())).is_ok(), "{good}");
    }
}

#[test]
fn one_name_has_one_list_of_rules() {
    let fault = refused(&json!({"allow": {"a.com": [], "A.COM.": []}}));
    assert!(fault.reason.contains("a second time"), "{fault}");
}

#[test]
fn host_grammar() {
    for (text, canonical) in [
        ("Example.COM.", "example.com"),
        ("*", "*"),
        ("*.example.com", "*.example.com"),
        ("www.*.com", "www.*.com"),
        ("a_b.example", "a_b.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("1e100.net", "1e100.net"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.Example.", "xn--bcher-kva.example"),
        ("*.bücher.example", "*.xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),
        ("例え.テスト", "xn--r8jz45g.xn--zckzah"),
        // Dots that only look different, and what cannot be seen.
        ("a\u{3002}b\u{ff0e}example", "a.b.example"),
        ("exa\u{ad}mple.com", "example.com"),
    ] {
        assert_eq!(HostPattern::parse(text).map(String::from).as_deref(), Ok(canonical));
    }
    let (label, name) = ("a".repeat(64), format!("{}com", "a.".repeat(126)));
    for bad in [
        "",
        ".",
        "..",
        "a..b",
        ".a.com",
        "a.com..",
        "foo*.com",
        "**.com",
        "https://a.com",
        "a.com/",
        "a.com:443",
        "a b",
        "\u{ff0a}.example.com",
        "\u{ff11}.2.3.4",
        "a\u{ff0f}b.example",
        "a\u{202e}b.example",
        "\u{5d0}a.example",
        "xn--a.bücher.example",
        "a\0.com",
        "-a.com",
        "a-.com",
        "1.2.3.4",
        "::1",
        "[::1]",
        "0x7f.1",
        "127.1",
        "a@b.com",
        &label,
        &name,
    ] {
        assert!(HostPattern::parse(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn ranges() {
    for (text, canonical) in [
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("1.1.1.1", "1.1.1.1/32"),
        ("::/0", "::/0"),
        ("FD00::/8", "fd00::/8"),
        ("2001:db8::1", "2001:db8::1/128"),
    ] {
        assert_eq!(Cidr::parse(text).map(String::from).as_deref(), Ok(canonical));
    }
    for bad in [
        "",
        "/",
        "10.0.0.0/",
        "10.0.0.0/33",
        "10.0.0.0/-1",
        "10.0.0.0/+8",
        "10.0.0.0/ 8",
        "10/8",
        "10.1.0.0/8",
        "fd00::1/8",
        "::/129",
        "::ffff:10.0.0.0/104",
        "a.com",
        "10.0.0.0/8/8",
    ] {
        assert!(Cidr::parse(bad).is_err(), "{bad:?}");
    }
}

/// Text that no other part of a policy holds.
const CANARY: &str = "canary7f3a";

fn any_json() -> impl Strategy<Value = Value> {
    // Field names that mean something, so that the parser is entered deeply.
    let key = prop_oneof![
        proptest::sample::select(vec![
            "mode",
            "allow",
            "subnets",
            "deny",
            "match",
            "transform",
            "headers",
            "forwardURL",
            "response",
            "statusCode",
            "body",
            "contentType",
            "path",
            "method",
            "queryString",
            "exact",
            "regex",
            "key",
            "value",
            "a.com",
            "*",
            "allowedDomains",
            "injectionRules",
            "domain",
            "allowedCIDRs",
        ])
        .prop_map(str::to_owned),
        ".{0,8}",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        proptest::sample::select(vec!["custom", "allow-all", "a.com", "10.0.0.0/8", "GET"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 64, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::btree_map(key.clone(), inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// A correct policy whose every header value holds the canary.
fn policy_with_secrets() -> impl Strategy<Value = Value> {
    let name = "[a-zA-Z][a-zA-Z0-9]{0,10}-x";
    let value = "[ -~]{0,20}".prop_map(|text| Value::from(format!("{text}{CANARY}")));
    let headers =
        proptest::collection::btree_map(name.prop_map(|n: String| n.to_lowercase()), value, 1..4);
    let host = "[a-z]{1,8}\\.(com|org|net)";
    proptest::collection::btree_map(host, proptest::collection::vec(headers, 1..4), 1..5)
        .prop_flat_map(|hosts| {
            let request = {
                let allow: serde_json::Map<_, _> = hosts
                    .iter()
                    .map(|(host, sets)| {
                        let sets: Vec<_> = sets.iter().map(|h| json!({"headers": h})).collect();
                        (host.clone(), json!([{"transform": sets}]))
                    })
                    .collect();
                json!({"allow": allow})
            };
            let rules: Vec<_> = hosts
                .iter()
                .map(|(host, sets)| json!({"domain": host, "headers": sets[0]}))
                .collect();
            prop_oneof![Just(request), Just(json!({"mode": "custom", "injectionRules": rules}))]
        })
}

proptest! {
    #[test]
    fn no_json_makes_the_parser_panic(value in any_json()) {
        if let Ok(policy) = parse(&value) {
            let stored = serde_json::to_value(&policy).unwrap();
            prop_assert_eq!(serde_json::from_value::<NetworkPolicy>(stored).unwrap(), policy);
        }
    }

    #[test]
    fn no_header_value_survives(sent in policy_with_secrets()) {
        let policy = parse(&sent).unwrap();
        let shown = policy.read_back().to_string();
        prop_assert!(shown.contains("headerNames"));
        let stored = serde_json::to_string(&policy).unwrap();
        for text in [shown, stored, format!("{policy:?}")] {
            prop_assert!(!text.contains(CANARY), "{}", text);
        }
    }

    #[test]
    fn no_error_repeats_a_header_value(sent in policy_with_secrets(), junk in ".{0,6}") {
        // Breaks a correct policy in one place and looks at what the refusal says.
        let text = sent.to_string().replacen("\"headers\":{", &format!("\"headers\":{{{}:\"{CANARY}\\n\",", json!(format!("x{junk}"))), 1);
        let broken: Value = serde_json::from_str(&text).unwrap();
        let fault = refused(&broken).to_string();
        prop_assert!(!fault.contains(CANARY), "{}", fault);
    }

    #[test]
    fn hosts_are_canonical(text in "[a-zA-Z0-9_.*-]{1,30}") {
        if let Ok(host) = HostPattern::parse(&text) {
            prop_assert_eq!(HostPattern::parse(host.as_str()), Ok(host));
        }
    }
}
