//! The compiled policy: tables of what it must do, and in `oracle` the same rules written a second time.

mod oracle;

use serde_json::{Value, json};

use super::*;
use crate::canonical::Host;

/// A policy as a client sends it.
fn parse(value: &Value) -> NetworkPolicy {
    let mut minted = 0u64;
    let mut mint = || {
        minted += 1;
        ValueId::new(minted, [0; 10])
    };
    NetworkPolicy::parse("networkPolicy", value, &mut mint)
        .unwrap_or_else(|e| panic!("{value}: {e}"))
        .policy
}

fn compile(value: &Value) -> Compiled {
    Compiled::new(&parse(value)).unwrap_or_else(|e| panic!("{value}: {e}"))
}

fn name(text: &str) -> Name {
    Name::parse(text.as_bytes()).expect(text)
}

/// The decision about a name as one word: the entry that allows it, behind `rules:` if it has rules.
fn verdict(policy: &Compiled, text: &str, port: u16) -> String {
    match policy.named(&name(text), port) {
        Named::Deny(reason) => format!("no: {}", reason.as_str()),
        Named::Pass { entry, .. } => entry.to_string(),
        Named::Intercept(site) => format!("rules:{}", site.entry),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect(text)
}

#[test]
fn what_lists_nothing_allows_nothing() {
    for policy in [
        json!({"mode": "deny-all"}),
        json!({}),
        json!({"mode": "custom"}),
        json!({"allow": []}),
        json!({"allow": {}}),
        json!({"subnets": {}}),
        json!({"subnets": {"allow": [], "deny": []}}),
        json!({"subnets": {"deny": ["203.0.113.0/24"]}}),
        json!({"subnets": {"deny": ["0.0.0.0/0"]}, "dns": "open", "plainHttp": true}),
    ] {
        let compiled = compile(&policy);
        assert_eq!(compiled.mode(), Mode::DenyAll, "{policy}");
        assert_eq!(verdict(&compiled, "a.com", 443), "no: deny_all");
        assert_eq!(compiled.resolves(&name("a.com")).reason, Reason::DenyAll);
        assert!(!compiled.resolves(&name("a.com")).allowed && !compiled.dns_on());
        assert!(matches!(compiled.address(ip("203.0.113.1")), Address::Denied { .. }));
        assert!(matches!(compiled.address(ip("192.0.2.1")), Address::Denied { .. }));
        assert_eq!(compiled.catch_all(443), None);
        assert!(!compiled.plain_http());
    }
}

#[test]
fn allow_all_allows_everything_and_sees_nothing() {
    let compiled = compile(&json!({"mode": "allow-all"}));
    assert_eq!(compiled.mode(), Mode::AllowAll);
    assert_eq!(verdict(&compiled, "a.com", 22), "allow-all");
    assert!(compiled.resolves(&name("a.com")).allowed && compiled.dns_on());
    assert!(matches!(compiled.address(ip("192.0.2.1")), Address::Allowed { .. }));
    assert!(compiled.catch_all(22).is_some());
    assert!(!compiled.plain_http());
}

#[test]
fn wildcards_cover_what_the_table_says() {
    for (pattern, covered, not) in [
        (
            "example.com",
            &["example.com", "EXAMPLE.com."][..],
            &[
                "www.example.com",
                "evil-example.com",
                "example.com.evil.test",
                "com",
                "xexample.com",
            ][..],
        ),
        (
            "*.example.com",
            &["a.example.com", "a.b.c.example.com", "xn--a.example.com"],
            &[
                "example.com",
                "evil-example.com",
                "xexample.com",
                "example.com.evil.test",
                "a.example.org",
            ],
        ),
        ("www.*.com", &["www.a.com"], &["www.com", "www.a.b.com", "a.www.a.com", "ww.a.com"]),
        ("*.*.com", &["a.b.com", "a.b.c.com"], &["a.com", "com"]),
        ("*.b.*.com", &["a.b.c.com", "x.a.b.c.com"], &["b.c.com", "a.b.com", "a.b.c.d.com"]),
        ("a.*", &["a.com", "a.b"], &["a", "a.b.com", "b.com"]),
        ("*", &["com", "a.com", "a.b.c.d.e.f"], &[]),
    ] {
        let compiled = compile(&json!({"allow": [pattern]}));
        for text in covered {
            assert_eq!(verdict(&compiled, text, 443), pattern, "{text}");
            assert!(compiled.resolves(&name(text)).allowed);
        }
        for text in not {
            assert_eq!(verdict(&compiled, text, 443), "no: domain_not_listed", "{pattern} {text}");
            assert!(!compiled.resolves(&name(text)).allowed);
        }
    }
}

#[test]
fn the_narrowest_entry_decides() {
    let compiled = compile(&json!({"allow": [
        "*", "*.com", "*.github.com", "api.github.com", "api.*.com", "*.*.com", "a.*.c.net", "*.b.c.net",
    ]}));
    for (text, entry) in [
        ("api.github.com", "api.github.com"),
        ("www.github.com", "*.github.com"),
        ("api.gitlab.com", "api.*.com"),
        ("x.y.com", "*.com"),
        ("y.com", "*.com"),
        ("y.org", "*"),
        ("org", "*"),
        // As many literal labels and as many stars: the one that covers single names.
        ("a.b.c.net", "a.*.c.net"),
        ("x.b.c.net", "*.b.c.net"),
    ] {
        assert_eq!(verdict(&compiled, text, 443), entry, "{text}");
    }
    // A wildcard with more literal labels beats one with less, even when it covers more names.
    let two = compile(&json!({"allow": ["*.b.com", "a.*.com", "*.a.b.com"]}));
    assert_eq!(verdict(&two, "x.a.b.com", 443), "*.a.b.com");
    assert_eq!(verdict(&two, "a.b.com", 443), "a.*.com");
}

#[test]
fn ports_narrow_an_entry_and_rules_act_on_one_port() {
    let rules = json!([{"response": {"statusCode": 403}}]);
    let compiled = compile(&json!({"allow": {
        "plain.com": [], "ruled.com": rules, "odd.com:8443": rules, "both.com": rules,
        "both.com:22": [], "*.odd.com": [], "ssh.com:22": [], "*:25": [],
    }}));
    for (text, port, want) in [
        ("plain.com", 443, "plain.com"),
        ("plain.com", 22, "plain.com"),
        ("ruled.com", 443, "rules:ruled.com"),
        ("ruled.com", 8443, "ruled.com"),
        ("ruled.com", 80, "ruled.com"),
        ("odd.com", 8443, "rules:odd.com:8443"),
        ("odd.com", 443, "no: domain_not_listed"),
        ("x.odd.com", 443, "*.odd.com"),
        ("both.com", 443, "rules:both.com"),
        ("both.com", 22, "both.com:22"),
        ("both.com", 23, "both.com"),
        ("ssh.com", 22, "ssh.com:22"),
        ("ssh.com", 443, "no: domain_not_listed"),
        ("ssh.com", 25, "*:25"),
    ] {
        assert_eq!(verdict(&compiled, text, port), want, "{text}:{port}");
    }
    // The name resolves whatever the port is.
    assert!(compiled.resolves(&name("ssh.com")).allowed);
    assert_eq!(compiled.catch_all(25).as_deref(), Some("*:25"));
    assert_eq!(compiled.catch_all(443), None);
}

#[test]
fn ranges_deny_before_they_allow_whatever_the_form() {
    let compiled = compile(&json!({"allow": ["a.com"], "subnets": {
        "allow": ["203.0.113.0/24", "2001:db8::/32", "192.0.2.7"],
        "deny": ["203.0.113.128/25", "2001:db8:bad::/48", "198.51.100.0/24"],
    }}));
    let of = |text: &str| compiled.address(ip(text));
    let allowed = |entry: &str| Address::Allowed { entry: entry.into() };
    let denied = |entry: &str| Address::Denied { entry: entry.into() };
    for (text, want) in [
        ("203.0.113.1", allowed("203.0.113.0/24")),
        ("203.0.113.127", allowed("203.0.113.0/24")),
        ("203.0.113.128", denied("203.0.113.128/25")),
        ("::ffff:203.0.113.1", allowed("203.0.113.0/24")),
        ("::ffff:203.0.113.200", denied("203.0.113.128/25")),
        ("64:ff9b::203.0.113.200", denied("203.0.113.128/25")),
        // 6to4 and Teredo lead to a denied address, and are no part of an allowed range.
        ("2002:cb00:71c8::1", denied("203.0.113.128/25")),
        ("2002:cb00:7101::1", Address::Unlisted),
        ("2001:0:808:808::34ff:8e37", denied("203.0.113.128/25")),
        ("192.0.2.7", allowed("192.0.2.7/32")),
        ("192.0.2.8", Address::Unlisted),
        ("2001:db8::1", allowed("2001:db8::/32")),
        ("2001:db8:bad::1", denied("2001:db8:bad::/48")),
        ("2001:db9::1", Address::Unlisted),
        ("198.51.100.1", denied("198.51.100.0/24")),
    ] {
        assert_eq!(of(text), want, "{text}");
    }
    // The narrowest range is the one that is named.
    let nested =
        compile(&json!({"subnets": {"allow": ["203.0.113.0/24", "203.0.113.7", "0.0.0.0/0"]}}));
    assert_eq!(nested.address(ip("203.0.113.7")), allowed("203.0.113.7/32"));
    assert_eq!(nested.address(ip("203.0.113.8")), allowed("203.0.113.0/24"));
    let all = compile(&json!({"subnets": {"allow": ["0.0.0.0/0", "::/0"]}}));
    assert_eq!(all.address(ip("8.8.8.8")), allowed("0.0.0.0/0"));
    assert_eq!(all.address(ip("2600::1")), allowed("::/0"));
    // Ranges alone open no name, and DNS only when the policy says so.
    assert!(!all.dns_on() && !all.resolves(&name("a.com")).allowed);
    let open = compile(&json!({"subnets": {"allow": ["0.0.0.0/0"]}, "dns": "open"}));
    assert!(open.dns_on() && open.resolves(&name("a.com")).allowed);
    assert_eq!(verdict(&open, "a.com", 443), "no: domain_not_listed");
}

/// Which rule of `a.com` acts on a request.
fn acts(
    rules: &Value,
    request: (&str, &str, Option<&str>),
    headers: &[(&str, &str)],
) -> Option<usize> {
    acts_at(rules, request, headers, 1_000)
}

fn acts_at(
    rules: &Value,
    (method, path, query): (&str, &str, Option<&str>),
    headers: &[(&str, &str)],
    now: u64,
) -> Option<usize> {
    let compiled = compile(&json!({"allow": {"a.com": rules}}));
    let Named::Intercept(site) = compiled.named(&name("a.com"), 443) else { return None };
    let mut map = http::HeaderMap::new();
    for (name, value) in headers {
        let name: http::HeaderName = name.parse().unwrap();
        map.append(name, value.parse().unwrap());
    }
    let view = RequestView { method, path, query, headers: &map };
    site.first_match(&view, now).map(|(i, _)| i)
}

/// A rule with this `match`.
fn when(matcher: &Value) -> Value {
    json!({"match": matcher, "response": {"statusCode": 403}})
}

#[test]
fn all_dimensions_agree_and_methods_are_alternatives() {
    let rules = json!([when(&json!({
        "method": ["GET", "POST"], "path": {"startsWith": "/v1/"},
        "queryString": [{"key": {"exact": "a"}}, {"key": {"exact": "b"}}],
        "headers": [{"key": {"exact": "X-Team"}, "value": {"exact": "Red"}}],
    }))]);
    let team = [("x-team", "Red")];
    let all = Some("a=1&b=2");
    assert_eq!(acts(&rules, ("GET", "/v1/x", all), &team), Some(0));
    assert_eq!(acts(&rules, ("POST", "/v1/", all), &team), Some(0));
    for (request, headers) in [
        (("PUT", "/v1/x", all), &team[..]),
        (("get", "/v1/x", all), &team),
        (("GET", "/V1/x", all), &team),
        (("GET", "/v1", all), &team),
        (("GET", "/v1/x", Some("a=1")), &team),
        (("GET", "/v1/x", Some("A=1&b=2")), &team),
        (("GET", "/v1/x", None), &team),
        (("GET", "/v1/x", all), &[("x-team", "red")]),
        (("GET", "/v1/x", all), &[]),
    ] {
        assert_eq!(acts(&rules, request, headers), None, "{request:?} {headers:?}");
    }
}

#[test]
fn an_encoded_slash_passes_where_all_rules_judge_it_as_a_slash() {
    let site = |path: Value| {
        let rules = json!([when(&json!({"path": path})), when(&json!({"method": ["GET"]}))]);
        let compiled = compile(&json!({"allow": {"a.com": rules}}));
        let Named::Intercept(site) = compiled.named(&name("a.com"), 443) else {
            panic!("no rules")
        };
        site
    };
    let prefix = site(json!({"startsWith": "/npm/"}));
    assert_eq!(prefix.path("/npm/@scope%2fname").as_deref(), Ok("/npm/@scope%2Fname"));
    assert_eq!(prefix.path("/other/@scope%2fname").as_deref(), Ok("/other/@scope%2Fname"));
    for bad in ["/npm%2fname", "/npm/..%2fadmin", "/npm/a%5cb", "/npm/%252fb"] {
        assert!(prefix.path(bad).is_err(), "{bad}");
    }
    let exact = site(json!({"exact": "/admin/users"}));
    assert!(exact.path("/admin%2Fusers").is_err());
    assert!(site(json!({"regex": "^/[^/]+$"})).path("/a%2Fb").is_err());
    // Without a look at paths nothing is ambiguous.
    let compiled = compile(&json!({"allow": {"a.com": [when(&json!({"method": ["GET"]}))]}}));
    let Named::Intercept(blind) = compiled.named(&name("a.com"), 443) else { panic!("no rules") };
    assert_eq!(blind.path("/a%5Cb%2f..").as_deref(), Ok("/a%5Cb%2F.."));
}

#[test]
fn key_and_value_are_of_the_same_entry() {
    let rules =
        json!([when(&json!({"headers": [{"key": {"exact": "x-a"}, "value": {"exact": "1"}}]}))]);
    let get = ("GET", "/", None);
    assert_eq!(acts(&rules, get, &[("x-a", "2"), ("x-b", "1")]), None);
    // Of several values any one will do.
    assert_eq!(acts(&rules, get, &[("x-a", "2"), ("X-A", "1")]), Some(0));
    let rules =
        json!([when(&json!({"queryString": [{"key": {"exact": "k"}, "value": {"exact": "v"}}]}))]);
    for (query, want) in [
        ("k=v", Some(0)),
        ("k=x&k=v", Some(0)),
        ("k=x&y=v", None),
        ("%6b=%76", Some(0)),
        ("k=v;x", None),
        ("x;k=v", None),
        ("", None),
        ("k", None),
        ("&&k=v&", Some(0)),
        ("k=v=", None),
        ("k=+v", None),
    ] {
        assert_eq!(acts(&rules, ("GET", "/", Some(query)), &[]), want, "{query}");
    }
    let plus = json!([when(&json!({"queryString": [{"value": {"exact": "a b"}}]}))]);
    assert_eq!(acts(&plus, ("GET", "/", Some("q=a+b")), &[]), Some(0));
    assert_eq!(acts(&plus, ("GET", "/", Some("q=a%20b")), &[]), Some(0));
    assert_eq!(acts(&plus, ("GET", "/", Some("q=a%2Bb")), &[]), None);
}

#[test]
fn header_names_are_compared_in_any_case() {
    for key in
        [json!({"exact": "X-Key"}), json!({"startsWith": "X-K"}), json!({"regex": "^X-K.Y$"})]
    {
        let rules = json!([when(&json!({"headers": [{"key": key}]}))]);
        assert_eq!(acts(&rules, ("GET", "/", None), &[("x-key", "v")]), Some(0), "{key}");
        assert_eq!(acts(&rules, ("GET", "/", None), &[("y-key", "v")]), None, "{key}");
    }
}

#[test]
fn the_first_rule_that_matches_and_is_not_over_acts() {
    let rules = json!([
        {"match": {"path": {"exact": "/a"}}, "response": {"statusCode": 401}},
        {"response": {"statusCode": 402}, "expiresAt": 1_000},
        {"response": {"statusCode": 403}},
    ]);
    assert_eq!(acts_at(&rules, ("GET", "/a", None), &[], 0), Some(0));
    assert_eq!(acts_at(&rules, ("GET", "/b", None), &[], 999), Some(1));
    assert_eq!(acts_at(&rules, ("GET", "/b", None), &[], 1_000), Some(2));
    let compiled = compile(&json!({"allow": {"a.com": rules}}));
    assert_eq!(compiled.next_expiry(0), Some(1_000));
    assert_eq!(compiled.next_expiry(1_000), None);
}

#[test]
fn expressions_mean_what_they_mean_in_re2() {
    for (regex, yes, no) in [
        ("b", "/abc", "/ac"),
        ("^/v\\d+/", "/v12/x", "/v\u{0661}/x"),
        ("^/[\\w-]+$", "/a-b_9", "/é"),
        ("\\ba\\b", "/a/", "/ab"),
        ("^/\\\\d$", "/\\d", "/5"),
        ("^/[^\\d]$", "/x", "/5"),
        ("(?i)^/ABC$", "/abc", "/abd"),
        ("^/.$", "/é", "/ab"),
    ] {
        let rules = json!([when(&json!({"path": {"regex": regex}}))]);
        assert_eq!(acts(&rules, ("GET", yes, None), &[]), Some(0), "{regex} {yes}");
        assert_eq!(acts(&rules, ("GET", no, None), &[]), None, "{regex} {no}");
    }
}

fn refused(matcher: &Value) -> PolicyError {
    let rule = json!({"match": matcher, "response": {"statusCode": 403}});
    let policy = json!({"allow": {"A.com:8443": [when(&json!({})), rule]}});
    Compiled::new(&parse(&policy)).expect_err(&matcher.to_string())
}

#[test]
fn a_bad_expression_is_refused_by_its_field() {
    let bad = json!({"regex": "("});
    for (matcher, field) in [
        (json!({"path": bad}), "path.regex"),
        (
            json!({"queryString": [{"key": {"exact": "a"}}, {"key": bad}]}),
            "queryString[1].key.regex",
        ),
        (json!({"queryString": [{"value": bad}]}), "queryString[0].value.regex"),
        (json!({"headers": [{"key": bad}]}), "headers[0].key.regex"),
        (json!({"headers": [{"value": bad}]}), "headers[0].value.regex"),
    ] {
        let error = refused(&matcher);
        let path = format!("networkPolicy.allow[\"a.com:8443\"][1].match.{field}");
        assert_eq!(error.field.as_deref(), Some(path.as_str()));
        assert_eq!(error.message, "is not a regular expression: unclosed group");
    }
    for large in ["(a{1000}){1000}", "\\pL{1000}"] {
        let error = refused(&json!({"path": {"regex": large}}));
        assert!(error.message.contains("too large"), "{error}");
    }
    let many: Vec<Value> =
        (0..=MAX_REGEXES).map(|i| json!({"value": {"regex": format!("a{i}")}})).collect();
    let rules: Vec<Value> = many.chunks(100).map(|c| when(&json!({"headers": c}))).collect();
    let policy = parse(&json!({"allow": {"a.com": rules}}));
    let error = Compiled::new(&policy).expect_err("too many");
    assert!(error.message.contains("at most 500"), "{error}");
}

#[test]
fn equal_expressions_count_once() {
    let rule = when(&json!({"path": {"regex": "^/x"}}));
    let allow: serde_json::Map<String, Value> =
        (0..=MAX_REGEXES).map(|i| (format!("h{i}.com"), json!([rule]))).collect();
    compile(&json!({"allow": allow}));
}

#[test]
fn a_site_knows_its_values_and_whether_it_is_the_same() {
    let policy = json!({"allow": {
        "a.com": [{"transform": [{"headers": {"x-a": "1", "x-b": "2"}}]}],
        "b.com": [{"sign": {"aws": {"credentials": "x"}}, "match": {"path": {"exact": "/"}}}],
        "c.com": [],
    }});
    let (one, two) = (compile(&policy), compile(&policy));
    assert_eq!(one.values().count(), 3);
    let site = |compiled: &Compiled, text: &str| match compiled.named(&name(text), 443) {
        Named::Intercept(site) => site,
        other => panic!("{other:?}"),
    };
    let (a, b) = (site(&one, "a.com"), site(&one, "b.com"));
    assert_eq!((a.values().count(), b.values().count()), (2, 1));
    assert!(one.values().all(|value| a.sees_value(value) != b.sees_value(value)));
    assert!(b.looks_at_paths() && !a.looks_at_paths());
    assert_eq!(a, site(&two, "a.com"));
    assert_ne!(a, b);
}

#[test]
fn a_hint_names_the_smallest_change() {
    let compiled = compile(&json!({
        "allow": ["a.com"], "subnets": {"allow": ["192.0.2.0/24"], "deny": ["192.0.2.0/25", "203.0.113.0/24"]},
    }));
    let hint = |text: &str, port| {
        let host = Host::parse(text.as_bytes()).unwrap();
        compiled.hint(&host, port).map(|hint| (hint.to_string(), hint.line()))
    };
    let both = |a: &str, b: &str| Some((a.to_owned(), b.to_owned()));
    assert_eq!(hint("a.com", 443), None);
    assert_eq!(hint("b.com", 443), both("allow b.com", "allow: [\"b.com\"]"));
    assert_eq!(hint("b.com", 22), both("allow b.com:22", "allow: [\"b.com:22\"]"));
    assert_eq!(
        hint("198.51.100.7", 443),
        both("allow 198.51.100.7", "subnets.allow: [\"198.51.100.7\"]")
    );
    assert_eq!(
        hint("192.0.2.7", 443),
        both("allow 192.0.2.0/25", "without \"192.0.2.0/25\" in subnets.deny")
    );
    assert_eq!(hint("192.0.2.200", 443), None);
}
