//! Cases 2, 103 to 119 and 132: credentials.

use std::rc::Rc;

use bivouac_types::secret::Secret;
use http::{Request, Response};
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::world::*;
use crate::reason::{Reason, Verdict};

const CANARY: &str = "Bearer canary-0123456789";

#[test]
fn case_103_a_credential_does_not_come_back_in_headers() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        world
            .at("ok.test", &["h2", "http/1.1"], |seen| {
                let bare = CANARY.trim_start_matches("Bearer ");
                Response::builder()
                    .header("x-echo", seen.header("authorization").unwrap_or_default())
                    .header("location", format!("https://evil.test/?t={bare}&x"))
                    .header("x-other", "canary")
                    .body(text("body"))
                    .expect("an answer")
            })
            .await;
        let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        assert_eq!(got.headers["x-echo"], "[redacted]");
        assert_eq!(got.headers["location"], "[redacted]");
        assert_eq!(got.headers["x-other"], "canary");
    });
}

#[test]
fn case_103_nor_in_the_words_behind_the_status() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let tls = world.root.server("ok.test", &["http/1.1"], |_| ());
        let origin = raw_origin(tls, |mut stream| async move {
            read_head(&mut stream).await;
            let answer = format!("HTTP/1.1 200 {CANARY}\r\nContent-Length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.flush().await;
            read_head(&mut stream).await;
        })
        .await;
        world.place("ok.test", 443, origin);
        let mut guest = world.tls("ok.test", &["http/1.1"]).await;
        guest.write_all(b"GET / HTTP/1.1\r\nHost: ok.test\r\n\r\n").await.expect("sent");
        let head = read_head(&mut guest).await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(!head.contains(CANARY));
    });
}

#[test]
fn case_104_trace() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text(""))).await;
        for method in ["TRACE", "TRACK"] {
            let request = Request::builder().method(method).uri("/").header("host", "ok.test");
            let got = world.ask("ok.test", request.body("").expect("")).await;
            assert_eq!((got.status, got.deny()), (405, "method_forbidden"));
        }
        assert!(log.borrow().is_empty());
    });
}

#[test]
fn case_105_a_placeholder_counts_only_where_the_rule_expects_it() {
    run(|| async {
        let world = World::new(&json!({"allow": {"ok.test": [{
            "match": {"headers": [{"key": {"exact": "x-api-key"}, "value": {"exact": "dummy"}}]},
            "transform": [{"headers": {"x-api-key": "canary-0123456789"}}]
        }]}}));
        let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text(""))).await;
        let ask = async |request: http::request::Builder, body: &'static str| {
            world.ask("ok.test", request.body(body).expect("")).await;
            log.borrow_mut().pop().expect("seen")
        };
        let seen = ask(get("ok.test", "/").header("x-api-key", "dummy"), "").await;
        assert_eq!(seen.header("x-api-key"), Some("canary-0123456789"));
        let seen = ask(get("ok.test", "/dummy?k=dummy").header("x-other", "dummy"), "dummy").await;
        assert_eq!((seen.target.as_str(), &seen.body[..]), ("/dummy?k=dummy", &b"dummy"[..]));
        assert!(!format!("{seen:?}").contains("canary"));
        let seen = ask(get("ok.test", "/").header("x-api-key", "dummy2"), "").await;
        assert_eq!(seen.header("x-api-key"), Some("dummy2"));
    });
}

#[test]
fn case_108_the_first_rule_that_matches_acts_alone() {
    run(|| async {
        let world = World::new(&json!({"allow": {"ok.test": [
            {"match": {"method": ["POST"]}, "transform": [{"headers": {"x-a": "canary-post"}}]},
            {"match": {"path": {"startsWith": "/a"}}, "transform": [{"headers": {"x-b": "canary-a"}}]},
            {"response": {"statusCode": 418, "body": "no", "contentType": "text/plain", "headers": {"x-why": "rule"}}}
        ]}}));
        let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text("fine"))).await;
        let post = Request::post("/a").header("host", "ok.test").body("").expect("");
        world.ask("ok.test", post).await;
        world.ask("ok.test", get("ok.test", "/a").body("").expect("")).await;
        let seen: Vec<_> = log
            .borrow()
            .iter()
            .map(|s| (s.header("x-a").map(str::to_owned), s.header("x-b").map(str::to_owned)))
            .collect();
        let want = |a: Option<&str>, b: Option<&str>| (a.map(str::to_owned), b.map(str::to_owned));
        assert_eq!(seen, [want(Some("canary-post"), None), want(None, Some("canary-a"))]);
        let got = world.ask("ok.test", get("ok.test", "/b").body("").expect("")).await;
        assert_eq!((got.status, got.body.as_str()), (418, "no"));
        assert_eq!(
            (&got.headers["x-why"], &got.headers["content-type"]),
            (&"rule".parse().expect(""), &"text/plain".parse().expect(""))
        );
        let line = world.line(|l| l.reason == Reason::RuleResponse).await;
        assert_eq!((line.verdict, line.rule, line.status), (Verdict::Deny, Some(2), Some(418)));
        assert_eq!(log.borrow().len(), 2);
    });
}

#[test]
fn case_109_a_value_that_is_no_header_is_not_sent() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text(""))).await;
        for bad in ["canary\r\nx-evil: 1", "canary\n", "canary\0", "canary \u{e4}"] {
            world.set_values(|v| {
                if let Ok(v) = v {
                    v.text = Secret::new(bad.to_owned());
                }
            });
            let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
            assert_eq!((got.status, got.deny()), (502, "credential_unavailable"), "{bad:?}");
            assert!(!got.body.contains("canary"), "{}", got.body);
        }
        world.set_values(|v| *v = Err("the vault is sealed".to_owned()));
        let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        assert_eq!((got.status, got.deny()), (502, "credential_unavailable"));
        assert!(got.body.contains("the vault is sealed"), "{}", got.body);
        assert!(log.borrow().is_empty());
        assert!(world.around.dialled.borrow().is_empty());
    });
}

#[test]
fn the_host_can_be_pinned() {
    run(|| async {
        let world = World::new(&inject("Host", "other.test"));
        for alpn in [&["http/1.1"][..], &["h2"]] {
            let log = world.at("ok.test", alpn, |_| Response::new(text(""))).await;
            world.replace(&inject("Host", "other.test"));
            world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
            let seen = log.borrow()[0].clone();
            let host = seen.authority.as_deref().or(seen.header("host")).map(str::to_owned);
            assert_eq!(host.as_deref(), Some("other.test"), "{alpn:?}");
        }
        assert!(world.around.dialled.borrow().iter().all(|d| d == "ok.test:443"));
    });
}

fn forwarding() -> serde_json::Value {
    json!({"allow": {"ok.test": [
        {"match": {"path": {"startsWith": "/some"}}, "forwardURL": "https://proxy.test:8443/proxy/"}
    ]}})
}

#[test]
fn case_111_and_112_a_forwarded_request_says_where_it_comes_from() {
    run(|| async {
        let world = World::new(&forwarding());
        let direct = world.at("ok.test", &["http/1.1"], |_| Response::new(text("direct"))).await;
        let (address, log) =
            origin(Some(world.root.server("proxy.test", &["h2", "http/1.1"], |_| ())), |seen| {
                let token = seen.header("vercel-sandbox-oidc-token").unwrap_or_default();
                Response::builder()
                    .header("x-echo", token)
                    .body(text("proxied"))
                    .expect("an answer")
            })
            .await;
        world.place("proxy.test", 8443, address);
        let spoofed = || {
            get("ok.test", "/some/path?foo=bar")
                .header("vercel-forwarded-host", "evil.test")
                .header("vercel_forwarded_host", "evil.test")
                .header("Vercel-Forwarded-Extra", "x")
                .header("vercel-sandbox-oidc-token", "mine")
                .header("x-bivouac-user", "root")
                .header("authorization", "guest's own")
                .body("")
                .expect("")
        };
        // No token: nothing is sent, and it says why.
        let got = world.ask("ok.test", spoofed()).await;
        assert_eq!((got.status, got.deny()), (503, "credential_unavailable"));
        assert!(got.body.contains("the engine is away") && got.headers.contains_key("retry-after"));
        assert!(log.borrow().is_empty());

        *world.around.token.borrow_mut() = Some("eyJ.canary-token.sig".to_owned());
        let got = world.ask("ok.test", spoofed()).await;
        assert_eq!((got.status, got.body.as_str()), (200, "proxied"));
        assert_eq!(got.headers["x-echo"], "[redacted]");
        let seen = log.borrow()[0].clone();
        assert_eq!(seen.target, "/proxy/some/path?foo=bar");
        assert_eq!(seen.version, http::Version::HTTP_11);
        for (name, value) in [
            ("host", "proxy.test:8443"),
            ("vercel-forwarded-host", "ok.test"),
            ("vercel-forwarded-scheme", "https"),
            ("vercel-forwarded-port", "443"),
            ("vercel-forwarded-path", "/some/path?foo=bar"),
            ("vercel-sandbox-oidc-token", "eyJ.canary-token.sig"),
            ("authorization", "guest's own"),
        ] {
            let all: Vec<_> = seen.headers.get_all(name).iter().collect();
            assert_eq!(all, [value], "{name}");
        }
        for gone in ["vercel_forwarded_host", "vercel-forwarded-extra", "x-bivouac-user"] {
            assert_eq!(seen.header(gone), None, "{gone}");
        }
        assert_eq!(*world.around.asked.borrow(), ["https://proxy.test:8443/proxy"; 2]);
        // What no rule matches goes to its own destination, without what the guest made up.
        let other = get("ok.test", "/other").header("vercel-sandbox-oidc-token", "mine");
        let got = world.ask("ok.test", other.body("").expect("")).await;
        assert_eq!(got.body, "direct");
        assert_eq!(direct.borrow()[0].header("vercel-sandbox-oidc-token"), None);
        let line = world.line(|l| l.reason == Reason::RuleForward && l.status == Some(200)).await;
        assert_eq!((line.path.as_deref(), line.rule), (Some("/some/path"), Some(0)));
    });
}

#[test]
fn case_113_nothing_that_is_written_holds_a_secret() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        world.at("ok.test", &["http/1.1"], |_| Response::new(text(""))).await;
        world.ask("ok.test", get("ok.test", "/?q=canary").body("").expect("")).await;
        world.place("ok.test", 443, ([127, 0, 0, 1], 1).into());
        world.interception.forget();
        world.replace(&inject("authorization", CANARY));
        let got = world.ask("ok.test", get("ok.test", "/?q=canary").body("").expect("")).await;
        assert_eq!(got.deny(), "upstream_unreachable");
        let lines = serde_json::to_string(&*world.lines.borrow()).expect("json");
        assert!(world.lines.borrow().len() == 2 && lines.contains("ok.test"), "{lines}");
        assert!(!lines.contains("canary"), "{lines}");
        let shown =
            format!("{:?} {:?} {:?}", world.interception, world.authority, world.ends.borrow());
        assert!(!shown.contains("canary") && !shown.contains("PRIVATE"), "{shown}");
    });
}

#[test]
fn case_115_and_116_connections_belong_to_a_credential_and_its_version() {
    run(|| async {
        for alpn in [&["http/1.1"][..], &["h2"]] {
            let world = World::new(&json!({"allow": {"ok.test": [
                {"match": {"path": {"startsWith": "/a"}}, "transform": [{"headers": {"x": "canary-a"}}]},
                {"match": {"path": {"startsWith": "/b"}}, "transform": [{"headers": {"x": "canary-b"}}]}
            ]}}));
            let log = world.at("ok.test", alpn, |_| Response::new(text("fine"))).await;
            let mut asker = world.asker("ok.test").await;
            for path in ["/a", "/a", "/b", "/c", "/a", "/b", "/c"] {
                assert_eq!(asker.send(get("ok.test", path).body("").expect("")).await.status, 200);
            }
            let used: Vec<_> =
                log.borrow().iter().map(|s| (s.target.clone(), s.connection)).collect();
            let of = |path: &str| {
                let mut all: Vec<_> =
                    used.iter().filter(|(p, _)| p == path).map(|(_, c)| *c).collect();
                all.dedup();
                all
            };
            let (a, b, c) = (of("/a"), of("/b"), of("/c"));
            assert_eq!((a.len(), b.len(), c.len()), (1, 1, 1), "{used:?}");
            assert!(a != b && b != c && a != c, "{used:?}");
            // A rotated secret: what comes next carries it, over a connection of its own.
            world.set_values(|v| {
                if let Ok(v) = v {
                    v.version += 1;
                    v.text = Secret::new(format!("{}-rotated", v.text.expose()));
                }
            });
            assert_eq!(asker.send(get("ok.test", "/a").body("").expect("")).await.status, 200);
            let last = log.borrow().last().cloned().expect("seen");
            assert_eq!(last.header("x"), Some("canary-a-rotated"));
            assert_ne!(vec![last.connection], a);
        }
    });
}

fn signing() -> serde_json::Value {
    let keys = json!({"accessKeyId": "AKIDREAL", "secretAccessKey": "canary-secret-key", "sessionToken": "canary-session"});
    json!({"allow": {"bucket.s3.eu-west-1.amazonaws.com": [{"sign": {"aws": keys}}]}})
}

#[test]
fn case_117_requests_are_signed_again() {
    run(|| async {
        let host = "bucket.s3.eu-west-1.amazonaws.com";
        let world = World::new(&signing());
        let log = world
            .at(host, &["http/1.1"], |seen| {
                let echo = seen.header("authorization").unwrap_or_default();
                Response::builder().header("x-echo", echo).body(text("")).expect("an answer")
            })
            .await;
        let put = |hash: Option<&str>| {
            let mut request = Request::put("/key%20one?x=1")
                .header("host", host)
                .header("authorization", "AWS4-HMAC-SHA256 Credential=DUMMY/20200101/eu-west-1/s3/aws4_request, SignedHeaders=host, Signature=0")
                .header("x-amz-date", "20200101T000000Z")
                .header("x-amz-security-token", "dummy");
            if let Some(hash) = hash {
                request = request.header("x-amz-content-sha256", hash);
            }
            request.body("body").expect("")
        };
        let hash = "230d8358dc8e8890b4c58deeb62912ee2f20357ae92a5cc861b98e68fe31acb5";
        for said in
            [Some("UNSIGNED-PAYLOAD"), Some(hash), None, Some("STREAMING-UNSIGNED-PAYLOAD-TRAILER")]
        {
            let got = world.ask(host, put(said)).await;
            assert_eq!(
                (got.status, &got.headers["x-echo"]),
                (200, &"[redacted]".parse().expect(""))
            );
            let seen = log.borrow_mut().pop().expect("seen");
            let auth = seen.header("authorization").expect("signed").to_owned();
            assert!(auth.starts_with("AWS4-HMAC-SHA256 Credential=AKIDREAL/"), "{auth}");
            assert!(auth.contains("/eu-west-1/s3/aws4_request"), "{auth}");
            assert!(auth.contains("host;") && auth.contains("x-amz-date"), "{auth}");
            assert_eq!(seen.header("x-amz-security-token"), Some("canary-session"));
            assert_ne!(seen.header("x-amz-date"), Some("20200101T000000Z"));
            assert_eq!(seen.header("x-amz-content-sha256"), Some(said.unwrap_or(hash)));
            assert_eq!((seen.target.as_str(), &seen.body[..]), ("/key%20one?x=1", &b"body"[..]));
            assert!(!format!("{seen:?}").contains("canary-secret-key"));
        }
        let got = world.ask(host, put(Some("STREAMING-AWS4-HMAC-SHA256-PAYLOAD"))).await;
        assert_eq!((got.status, got.deny()), (400, "rule_sign"));
        assert!(got.body.contains("chunk signing off"), "{}", got.body);
        assert!(log.borrow().is_empty());
    });
}

#[test]
fn case_118_a_credential_for_reading_is_not_one_for_pushing() {
    run(|| async {
        let world = World::new(&json!({"allow": {"ok.test": [{
            "match": {"path": {"regex": "^/org/repo\\.git/(info/refs|git-upload-pack)$"}},
            "transform": [{"headers": {"authorization": CANARY}}]
        }, {
            "match": {"path": {"regex": "git-receive-pack$"}},
            "response": {"statusCode": 403}
        }]}}));
        let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text(""))).await;
        let post = |path: &str| Request::post(path).header("host", "ok.test").body("").expect("");
        assert_eq!(world.ask("ok.test", post("/org/repo.git/git-upload-pack")).await.status, 200);
        assert_eq!(log.borrow()[0].header("authorization"), Some(CANARY));
        for push in ["/org/repo.git/git-receive-pack", "/org/x/../repo.git/git-receive-%70ack"] {
            assert_eq!(world.ask("ok.test", post(push)).await.status, 403);
        }
        assert_eq!(log.borrow().len(), 1);
    });
}

#[test]
fn case_119_another_host_gets_no_credential() {
    run(|| async {
        let world = World::new(&json!({"allow": {
            "registry.test": [{"match": {"path": {"startsWith": "/npm/"}}, "transform": [{"headers": {"authorization": CANARY}}]}],
            "*.test": [{"match": {"path": {"exact": "/never"}}, "transform": [{"headers": {"x": "canary"}}]}]
        }}));
        let registry = world.at("registry.test", &["http/1.1"], |_| Response::new(text(""))).await;
        let cdn = world.at("cdn.test", &["http/1.1"], |_| Response::new(text(""))).await;
        world.ask("registry.test", get("registry.test", "/npm/left-pad").body("").expect("")).await;
        world.ask("registry.test", get("registry.test", "/other/").body("").expect("")).await;
        world.ask("cdn.test", get("cdn.test", "/npm/left-pad.tgz").body("").expect("")).await;
        let registry: Vec<_> =
            registry.borrow().iter().map(|s| s.header("authorization").is_some()).collect();
        assert_eq!(registry, [true, false]);
        assert!(cdn.borrow()[0].header("authorization").is_none());
    });
}

#[test]
fn case_2_and_132_a_destination_is_verified_or_gets_nothing() {
    run(|| async {
        let other = TestRoot::new();
        for alpn in [&["h2"][..], &["http/1.1"]] {
            let world = World::new(&inject("authorization", CANARY));
            let root = Rc::clone(&world.root);
            let bad = [
                ("another root", other.server("ok.test", alpn, |_| ())),
                ("another name", root.server("evil.test", alpn, |_| ())),
                (
                    "expired",
                    root.server("ok.test", alpn, |p| {
                        p.not_before = rcgen::date_time_ymd(2020, 1, 1);
                        p.not_after = rcgen::date_time_ymd(2021, 1, 1);
                    }),
                ),
                (
                    "not yet",
                    root.server("ok.test", alpn, |p| {
                        p.not_before = rcgen::date_time_ymd(2200, 1, 1);
                        p.not_after = rcgen::date_time_ymd(2201, 1, 1);
                    }),
                ),
            ];
            for (what, tls) in bad {
                let (address, log) = origin(Some(tls), |_| Response::new(text(""))).await;
                world.place("ok.test", 443, address);
                let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
                assert_eq!((got.status, got.deny()), (502, "upstream_tls"), "{what}");
                assert!(got.body.contains("egress_failed"), "{}", got.body);
                assert!(log.borrow().is_empty(), "{what}");
            }
            // A destination without TLS is not spoken to in plain text.
            let (address, log) = origin(None, |_| Response::new(text(""))).await;
            world.place("ok.test", 443, address);
            let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
            assert_eq!(got.deny(), "upstream_tls");
            assert!(log.borrow().is_empty());
            let line = world.line(|l| l.reason == Reason::UpstreamTls).await;
            assert_eq!((line.verdict, line.status), (Verdict::Error, Some(502)));
        }
    });
}
