//! Which headers pass: for any headers, not for some.

use proptest::prelude::*;

use super::*;

/// Names that matter, in any case and with either kind of line, and some that do not.
fn names() -> impl Strategy<Value = String> {
    let known = prop::sample::select(vec![
        "authorization",
        "x-api-key",
        "connection",
        "keep-alive",
        "te",
        "transfer-encoding",
        "content-length",
        "upgrade",
        "host",
        "expect",
        "proxy-authorization",
        "proxy-connection",
        "http2-settings",
        "vercel-forwarded-host",
        "vercel-sandbox-oidc-token",
        "x-bivouac-deny",
        "x-http-method-override",
        "x-original-url",
        "cookie",
        "accept",
        "x-one",
    ]);
    (known, any::<u64>(), any::<bool>()).prop_map(|(name, case, under)| {
        let changed = name.chars().enumerate().map(|(n, c)| {
            let c = if under && c == '-' { '_' } else { c };
            if case >> (n % 64) & 1 == 1 { c.to_ascii_uppercase() } else { c }
        });
        changed.collect()
    })
}

fn any_headers() -> impl Strategy<Value = HeaderMap> {
    prop::collection::vec((names(), "[ -~]{0,12}", names()), 0..20).prop_map(|all| {
        let mut map = HeaderMap::new();
        for (name, value, other) in all {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
            // Connection headers list names, sometimes the ones that rules set.
            let value = if name == header::CONNECTION { format!("close, {other}") } else { value };
            map.append(name, HeaderValue::from_str(&value).expect("a value"));
        }
        map
    })
}

/// As CGI and its like read a name.
fn cgi(name: &str) -> String {
    name.to_ascii_uppercase().replace('-', "_")
}

proptest! {
    /// Nothing that a server may take for what the rule sets, for the broker's own word, for another
    /// framing or for another target leaves beside a credential.
    #[test]
    fn beside_a_credential_nothing_of_the_guest_competes(from in any_headers()) {
        let sets = [header::AUTHORIZATION, HeaderName::from_static("x-api-key")];
        let to = request(&from, &sets, true);
        for name in to.keys() {
            let read = cgi(name.as_str());
            for set in &sets {
                prop_assert_ne!(&read, &cgi(set.as_str()));
            }
            prop_assert!(!read.starts_with("VERCEL_") && !read.starts_with("X_BIVOUAC_"));
            prop_assert!(!read.starts_with("PROXY_") && !name.as_str().contains('_'));
            prop_assert!(!["CONNECTION", "KEEP_ALIVE", "TE", "TRANSFER_ENCODING", "CONTENT_LENGTH", "UPGRADE", "HOST", "EXPECT", "HTTP2_SETTINGS", "X_HTTP_METHOD_OVERRIDE", "X_ORIGINAL_URL"].contains(&read.as_str()));
        }
    }

    /// Without one, identity and framing are still not the guest's to claim, and all else is as it was.
    #[test]
    fn without_a_credential_the_rest_passes_unchanged(from in any_headers()) {
        let to = request(&from, &[], false);
        let named: Vec<_> = listed(&from);
        for (name, value) in &from {
            let kept = to.get_all(name).iter().any(|v| v == value);
            let own = ["cookie", "accept", "x-one", "authorization", "x-api-key", "x_api_key", "x-original-url"];
            if own.contains(&name.as_str()) && !named.contains(name) {
                prop_assert!(kept, "{name} is lost");
            }
        }
        for name in to.keys() {
            let read = cgi(name.as_str());
            prop_assert!(!read.starts_with("VERCEL_FORWARDED_") && !read.starts_with("X_BIVOUAC_"));
            prop_assert!(!named.contains(name) && name != header::CONNECTION && name != header::TRANSFER_ENCODING);
        }
    }

    /// A secret is found wherever it stands in a header of the answer.
    #[test]
    fn a_secret_does_not_come_back(before in "[ -~]{0,20}", after in "[ -~]{0,20}", secret in "[!-~]{6,30}", scheme in prop::sample::select(vec!["", "Bearer ", "Basic "])) {
        let mut secrets = Secrets::default();
        secrets.add(&HeaderValue::from_str(&format!("{scheme}{secret}")).expect("a value"));
        let mut from = HeaderMap::new();
        let value = HeaderValue::from_str(&format!("{before}{secret}{after}")).expect("a value");
        from.insert("x-echo", value.clone());
        from.insert("grpc-message", value);
        for to in [response(&from, &secrets), trailers(&from, &secrets)] {
            for value in to.values() {
                prop_assert_eq!(value.as_bytes(), b"[redacted]");
            }
        }
    }
}
