//! Ready-made credentials: what each kind expands to, and what it refuses.

use bivouac_types::policy::{AwsSign, Match, TextMatch};

use super::*;

fn spec(kind: &str, options: &[(&str, &str)]) -> CredentialSpec {
    CredentialSpec {
        kind: kind.to_owned(),
        options: options.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        ..CredentialSpec::default()
    }
}

fn secret(mut spec: CredentialSpec, name: &str) -> CredentialSpec {
    spec.secret = Some(name.to_owned());
    spec
}

/// Host, methods, path and template of each rule.
fn rules(spec: &CredentialSpec) -> Vec<String> {
    let preset = presets::expand(spec).unwrap();
    let show = |path: Option<TextMatch>| match path {
        None => "*".to_owned(),
        Some(TextMatch::Exact(text)) => format!("={text}"),
        Some(TextMatch::StartsWith(text)) => format!("{text}*"),
        Some(TextMatch::Regex(text)) => format!("~{text}"),
    };
    preset
        .rules
        .into_iter()
        .map(|rule| {
            let port = rule.port.map(|port| format!(":{port}")).unwrap_or_default();
            let Match { path, method, .. } = rule.matcher;
            format!("{}{port} {} {} {}", rule.host, method.join("+"), show(path), rule.value)
        })
        .collect()
}

#[test]
fn github_reads_by_default() {
    let basic = "Basic ${basic:x-access-token:GITHUB_TOKEN}";
    let bearer = "Bearer ${secret:GITHUB_TOKEN}";
    assert_eq!(
        rules(&spec("github", &[])),
        [
            format!("github.com GET ~^/(?i:[^/]+/[^/]+)(?:\\.git)?/info/refs$ {basic}"),
            format!("github.com POST ~^/(?i:[^/]+/[^/]+)(?:\\.git)?/git-upload-pack$ {basic}"),
            format!("api.github.com GET+HEAD * {bearer}"),
            format!("raw.githubusercontent.com GET+HEAD * {bearer}"),
            format!("codeload.github.com GET+HEAD * {bearer}"),
        ]
    );
    let env = presets::expand(&spec("github", &[])).unwrap().env;
    assert!(env["GH_TOKEN"].starts_with("bivouac-placeholder-"), "{env:?}");
    let again = presets::expand(&spec("github", &[])).unwrap().env;
    assert_ne!(env["GH_TOKEN"], again["GH_TOKEN"], "a dummy is of one sandbox");
}

#[test]
fn github_pushes_and_narrows_when_told() {
    let wide = rules(&spec("github", &[("push", ""), ("repos", "a/b.c+d/*")]));
    let repo = "(?:a/b\\.c|d/[^/]+)";
    assert!(
        wide.iter()
            .any(|r| r.contains(&format!("POST ~^/(?i:{repo})(?:\\.git)?/git-receive-pack$")))
    );
    assert!(wide.iter().any(|r| r.starts_with(&format!("api.github.com GET+HEAD ~^/repos/(?i:{repo})(?:/|$)"))));
    assert!(!rules(&spec("github", &[])).iter().any(|r| r.contains("receive-pack")));
    let write = rules(&spec("github", &[("write", "true")]));
    assert!(write.iter().any(|r| r.starts_with("api.github.com  * ")), "{write:?}");
    for bad in ["a", "a/b/c", "a/b c", "a/(b)", "*/b", ""] {
        assert!(presets::expand(&spec("github", &[("repos", bad)])).is_err(), "{bad}");
    }
}

#[test]
fn npm_follows_its_registry() {
    assert_eq!(
        rules(&spec("npm", &[("registry", "https://npm.corp.test/")])),
        ["npm.corp.test GET+HEAD * Bearer ${secret:NPM_TOKEN}"]
    );
    let path = spec("npm", &[("registry", "https://npm.corp.test:8443/a/b/"), ("publish", "")]);
    assert_eq!(rules(&path), ["npm.corp.test:8443  /a/b/* Bearer ${secret:NPM_TOKEN}"]);
    let env = presets::expand(&path).unwrap().env;
    assert_eq!(env["NPM_CONFIG_REGISTRY"], "https://npm.corp.test:8443/a/b/");
    let scoped = spec("npm", &[("registry", "https://npm.corp.test/"), ("scoped", "")]);
    assert!(!presets::expand(&scoped).unwrap().env.contains_key("NPM_CONFIG_REGISTRY"));
    for bad in [None, Some("http://npm.corp.test/"), Some("https://u:p@x.test/"), Some("x")] {
        let options: Vec<_> = bad.map(|url| ("registry", url)).into_iter().collect();
        let why = presets::expand(&spec("npm", &options)).err().unwrap();
        assert!(why.contains("registry"), "{why}");
    }
}

#[test]
fn a_key_counts_only_in_its_header() {
    for (kind, header, prefix, variable) in [
        ("anthropic", "x-api-key", "", "ANTHROPIC_API_KEY"),
        ("openai", "authorization", "Bearer ", "OPENAI_API_KEY"),
    ] {
        let preset = presets::expand(&spec(kind, &[])).unwrap();
        let dummy = &preset.env[variable];
        let entry = &preset.rules[0].matcher.headers[0];
        assert_eq!(entry.key, Some(TextMatch::Exact(header.to_owned())));
        assert_eq!(entry.value, Some(TextMatch::Exact(format!("{prefix}{dummy}"))));
        assert!(preset.rules[0].value.ends_with(&format!("${{secret:{variable}}}")));
    }
    let preset = presets::expand(&secret(
        spec("bearer", &[("host", "api.x.test"), ("env", "X_KEY"), ("header", "X-Key")]),
        "X",
    ));
    let preset = preset.unwrap();
    assert_eq!(preset.rules[0].value, "${secret:X}");
    let value = Some(TextMatch::Exact(preset.env["X_KEY"].clone()));
    assert_eq!(preset.rules[0].matcher.headers[0].value, value);
}

#[test]
fn aws_signs_what_the_dummy_signed() {
    let mut preset =
        presets::expand(&spec("aws", &[("service", "s3"), ("region", "eu-west-1")])).unwrap();
    let hosts: Vec<&str> = preset.rules.iter().map(|rule| rule.host.as_str()).collect();
    assert_eq!(hosts, ["s3.eu-west-1.amazonaws.com", "*.s3.eu-west-1.amazonaws.com"]);
    let id = preset.env["AWS_ACCESS_KEY_ID"].clone();
    assert!(id.starts_with("AKIA") && id.len() == 20, "{id}");
    let rule = preset.rules.remove(0);
    let value = rule.matcher.headers[0].value.clone();
    assert_eq!(value, Some(TextMatch::Regex(format!("Credential={id}/"))));
    let Action::Sign(AwsSign { service, region, .. }) = (rule.action)(ValueId::new(1, [1; 10]))
    else {
        panic!("does not sign")
    };
    assert_eq!((service.as_deref(), region.as_deref()), (Some("s3"), Some("eu-west-1")));
    assert_eq!(rules(&spec("aws", &[])).len(), 1);
}

#[test]
fn what_a_kind_does_not_take_is_refused() {
    for (kind, options, part) in [
        ("gitlab", &[][..], "there are github"),
        ("github", &[("hots", "x")], "no 'hots'"),
        ("github", &[("push", "maybe")], "true or false"),
        ("bearer", &[("host", "x.test")], "secret"),
        ("openai", &[("host", "x.test:0")], "port"),
        ("openai", &[("path", "v1")], "'/'"),
        ("aws", &[("region", "EU")], "region"),
    ] {
        let why = presets::expand(&spec(kind, options)).err().unwrap();
        assert!(why.contains(part), "{kind}: {why}");
    }
    let user = secret(spec("basic", &[("host", "x.test"), ("user", "a}b")]), "S");
    assert!(presets::expand(&user).is_err());
    assert!(presets::expand(&secret(spec("github", &[]), "a b")).is_err());
}

fn entry(host: &str, rules: Vec<Rule>) -> Domain {
    Domain { host: HostPattern::parse(host).unwrap(), port: None, rules }
}

fn rule(name: &str, actor: Option<&str>) -> Rule {
    Rule {
        credential: Some(name.to_owned()),
        actor: actor.map(str::to_owned),
        ..Rule::new(Some(Match::default()), Action::Forward { url: "https://p.test".to_owned() })
    }
}

fn made(name: &str, host: &str) -> Made {
    Made {
        name: name.to_owned(),
        entries: vec![entry(host, vec![rule(name, None)])],
        env: BTreeMap::from([("KEY".to_owned(), "dummy".to_owned())]),
    }
}

fn shape(policy: &NetworkPolicy) -> Vec<String> {
    let NetworkPolicy::Custom(custom) = policy else { return vec![format!("{policy:?}")] };
    let name = |rule: &Rule| rule.credential.clone().unwrap_or_else(|| "-".to_owned());
    custom
        .domains
        .iter()
        .map(|d| format!("{} {}", d.entry(), d.rules.iter().map(name).collect::<String>()))
        .collect()
}

#[test]
fn every_mode_takes_a_credential_and_gives_it_back() {
    let mut env = BTreeMap::from([("KEY".to_owned(), "mine".to_owned())]);
    let open = add(&[made("c", "a.test")], &NetworkPolicy::AllowAll, &mut env).unwrap();
    assert_eq!(shape(&open), ["* ", "a.test c"]);
    assert_eq!(env["KEY"], "mine", "a variable that is there stays");
    let (open, stay) = without(open, "c");
    assert_eq!((shape(&open), stay.len()), (vec!["* ".to_owned()], 0));

    let mut env = BTreeMap::new();
    let shut = add(&[made("c", "a.test")], &NetworkPolicy::DenyAll, &mut env).unwrap();
    assert_eq!(shape(&shut), ["a.test c"]);
    assert_eq!(env["KEY"], "dummy");
    let (shut, stay) = without(shut, "c");
    assert_eq!((shape(&shut), stay), (vec!["a.test ".to_owned()], vec!["a.test".to_owned()]));

    let catch_all = Rule::new(None, Action::Forward { url: "https://p.test".to_owned() });
    let listed = CustomPolicy {
        domains: vec![entry("a.test", vec![rule("x", None), catch_all])],
        ..CustomPolicy::default()
    };
    let policy = add(&[made("c", "a.test")], &NetworkPolicy::Custom(listed), &mut env).unwrap();
    assert_eq!(shape(&policy), ["a.test xc-"], "ahead of the rule that takes all");
    let policy = add(&[made("c", "b.test")], &policy, &mut env).unwrap();
    assert_eq!(shape(&policy), ["a.test x-", "b.test c"], "one of the same name gives way");
    let names: Vec<String> = super::listed(&policy).into_iter().map(|c| c.name).collect();
    assert_eq!(names, ["c", "x"]);
}
