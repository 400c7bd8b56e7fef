//! Cases 25 to 53: HTTP/1.1.

use std::rc::Rc;

use http::{Request, Response, Version};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::world::*;
use crate::reason::{Reason, Verdict};

const CANARY: &str = "Bearer canary-0123456789";

async fn world() -> (Rc<World>, Log) {
    let world = World::new(&inject("authorization", CANARY));
    let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text("fine"))).await;
    (world, log)
}

/// Sends bytes that have to be refused with this status, and checks that nothing reached the origin.
fn refused(case: &'static str, status: u16, reason: Reason, requests: &[&str]) {
    let requests: Vec<String> = requests.iter().map(|r| (*r).to_owned()).collect();
    run(|| async move {
        let (world, log) = world().await;
        for bytes in requests {
            let got = world.raw("ok.test", &bytes).await;
            let want = format!("HTTP/1.1 {status} ");
            assert!(got.starts_with(&want), "case {case}: {bytes:?} got {got:?}");
            let deny = format!("x-bivouac-deny: {}\r\n", reason.as_str());
            assert!(got.contains(&deny), "case {case}: {bytes:?} got {got:?}");
            assert!(got.contains("\"error\""), "case {case}: {got:?}");
            assert_eq!(got.matches("HTTP/1.1 ").count(), 1, "case {case}: answered twice: {got:?}");
        }
        assert!(log.borrow().is_empty(), "case {case}: {:?} reached the origin", log.borrow());
        let line = world.line(|l| l.reason == reason).await;
        assert_eq!(line.verdict, Verdict::Deny, "case {case}");
    });
}

#[test]
fn a_request_passes_with_its_credential() {
    run(|| async {
        let (world, log) = world().await;
        let got = world.ask("ok.test", get("ok.test", "/a?b=1").body("").expect("")).await;
        assert_eq!((got.status, got.body.as_str()), (200, "fine"));
        let seen = log.borrow()[0].clone();
        assert_eq!((seen.method.as_str(), seen.target.as_str()), ("GET", "/a?b=1"));
        assert_eq!(seen.header("authorization"), Some(CANARY));
        assert_eq!(seen.header("host"), Some("ok.test"));
        assert_eq!(seen.version, Version::HTTP_11);
        let line = world.line(|l| l.reason == Reason::RuleTransform).await;
        assert_eq!((line.path.as_deref(), line.status), (Some("/a"), Some(200)));
        assert_eq!((line.rule, line.bytes_down), (Some(0), Some(4)));
        assert_eq!((line.host.as_deref(), line.intercepted), (Some("ok.test"), true));
        let text = serde_json::to_string(&line).expect("json");
        assert!(!text.contains("canary") && !text.contains("b=1"), "{text}");
    });
}

#[test]
fn case_25_length_and_transfer_coding() {
    refused(
        "25",
        400,
        Reason::HttpInvalid,
        &[
            "POST / HTTP/1.1\r\nHost: ok.test\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        ],
    );
}

#[test]
fn case_26_lengths_that_differ_or_are_no_numbers() {
    refused(
        "26",
        400,
        Reason::HttpInvalid,
        &[
            "POST / HTTP/1.1\r\nHost: ok.test\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nContent-Length: 1, 1\r\n\r\nx",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nContent-Length: +1\r\n\r\nx",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nContent-Length: -1\r\n\r\nx",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nContent-Length:\r\n\r\nx",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nContent-Length: 99999999999999999999\r\n\r\nx",
        ],
    );
}

#[test]
fn case_27_and_28_transfer_codings() {
    refused(
        "27",
        400,
        Reason::HttpInvalid,
        &[
            "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.0\r\nHost: ok.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: \r\n\r\n0\r\n\r\n",
        ],
    );
}

#[test]
fn case_29_and_30_folds_bare_ends_of_lines_and_nul() {
    refused(
        "29",
        400,
        Reason::HttpInvalid,
        &[
            "GET / HTTP/1.1\r\nHost: ok.test\r\nX: a\r\n b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\nX: a\rb\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\nX: a\0b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\nX\0: b\r\n\r\n",
            "GET / HTTP/1.1\nHost: ok.test\n\n",
            "GET / HTTP/1.1\r\nHost: ok.test\nX: b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\n\n",
            "\r\nGET / HTTP/1.1\r\nHost: ok.test\r\n\r\n",
            "GET  / HTTP/1.1\r\nHost: ok.test\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\nno colon\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\n: no name\r\n\r\n",
        ],
    );
}

#[test]
fn case_31_and_32_hosts_that_are_two_or_none() {
    refused(
        "31",
        400,
        Reason::HttpInvalid,
        &[
            "GET / HTTP/1.1\r\nHost: ok.test\r\nHost: evil.test\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\nHost: ok.test\r\n\r\n",
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nX: y\r\n\r\n",
        ],
    );
}

#[test]
fn case_4_and_33_requests_for_another_host() {
    refused(
        "33",
        421,
        Reason::AuthorityMismatch,
        &[
            "GET / HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n",
            "GET http://evil.test/ HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n",
            "GET https://evil.test/ HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n",
            "GET http://ok.test/ HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n",
            "GET https://ok.test@evil.test/ HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n",
            "GET https://x@ok.test/ HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: x@ok.test\r\nConnection: close\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test:8443\r\nConnection: close\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: 203.0.113.66\r\nConnection: close\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: 2130706433\r\nConnection: close\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: \r\nConnection: close\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test.evil.test\r\nConnection: close\r\n\r\n",
        ],
    );
}

#[test]
fn a_host_in_another_spelling_is_the_same_host() {
    run(|| async {
        let (world, log) = world().await;
        for host in ["OK.test", "ok.test.", "ok.test:443"] {
            let got = world.ask("ok.test", get(host, "/").body("").expect("")).await;
            assert_eq!(got.status, 200, "{host}");
        }
        let whole = get("ok.test", "https://ok.test/x").body("").expect("");
        let got = world.ask("ok.test", whole).await;
        assert_eq!(got.status, 200);
        assert!(log.borrow().iter().all(|s| s.header("host") == Some("ok.test")));
    });
}

#[test]
fn case_34_connect() {
    refused(
        "34",
        405,
        Reason::MethodForbidden,
        &[
            "CONNECT evil.test:443 HTTP/1.1\r\nHost: ok.test\r\n\r\nGET / HTTP/1.1\r\nHost: ok.test\r\n\r\n",
            "CONNECT ok.test:443 HTTP/1.1\r\nHost: ok.test\r\n\r\n",
        ],
    );
}

#[test]
fn case_35_other_upgrades() {
    refused(
        "35",
        405,
        Reason::MethodForbidden,
        &[
            "GET / HTTP/1.1\r\nHost: ok.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\nConnection: Upgrade\r\nUpgrade: websocket, h2c\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: ok.test\r\nConnection: Upgrade\r\nUpgrade: tls/1.0\r\n\r\nGET /2 HTTP/1.1\r\nHost: ok.test\r\n\r\n",
        ],
    );
}

#[test]
fn case_37_and_38_the_guests_own_credential_is_replaced() {
    run(|| async {
        let (world, log) = world().await;
        let bytes = "GET / HTTP/1.1\r\nHost: ok.test\r\nAuthorization: mine\r\nAUTHORIZATION: mine too\r\n\
                     Connection: close, authorization, x-listed\r\nX-Listed: gone\r\nKeep-Alive: 5\r\n\
                     Proxy-Authorization: Basic eDp5\r\nX-Kept: yes\r\n\r\n";
        let got = world.raw("ok.test", bytes).await;
        assert!(got.starts_with("HTTP/1.1 200 "), "{got}");
        let seen = log.borrow()[0].clone();
        let all: Vec<_> = seen.headers.get_all("authorization").iter().collect();
        assert_eq!(all, [CANARY]);
        for gone in ["x-listed", "keep-alive", "proxy-authorization", "connection"] {
            assert_eq!(seen.header(gone), None, "{gone}");
        }
        assert_eq!(seen.header("x-kept"), Some("yes"));
    });
}

#[test]
fn case_39_and_110_twins_and_what_steers_are_dropped_beside_a_credential() {
    run(|| async {
        let (world, log) = world().await;
        let request = || {
            get("ok.test", "/")
                .header("x_api_key", "mine")
                .header("content_length", "9")
                .header("x-http-method-override", "DELETE")
                .header("x-original-url", "/admin")
                .header("x-forwarded-host", "evil.test")
                .header("x-forwarded-for", "203.0.113.9")
                .body("")
                .expect("")
        };
        world.ask("ok.test", request()).await;
        let dropped = [
            "x_api_key",
            "content_length",
            "x-http-method-override",
            "x-original-url",
            "x-forwarded-host",
            "x-forwarded-for",
        ];
        for gone in dropped {
            assert_eq!(log.borrow()[0].header(gone), None, "{gone}");
        }
        // Where no rule adds anything, they are the guest's own affair.
        world.replace(&json!({"allow": {"ok.test": [
            {"match": {"path": {"exact": "/other"}}, "transform": [{"headers": {"a": "b"}}]}
        ]}}));
        world.ask("ok.test", request()).await;
        assert_eq!(log.borrow()[1].header("x_api_key"), Some("mine"));
        assert_eq!(log.borrow()[1].header("x-http-method-override"), Some("DELETE"));
        let line = world.line(|l| l.reason == Reason::NoRuleMatched).await;
        assert_eq!(line.verdict, Verdict::Allow);
    });
}

#[test]
fn case_40_and_41_the_path_that_was_matched_is_sent() {
    run(|| async {
        let world = World::new(&json!({"allow": {"ok.test": [{
            "match": {"path": {"startsWith": "/public/"}},
            "transform": [{"headers": {"authorization": CANARY}}]
        }]}}));
        let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text("fine"))).await;
        for (sent, arrives, with) in [
            ("/public/a", Some("/public/a"), true),
            ("/public/../secret", Some("/secret"), false),
            ("/public/%2e%2e/secret", Some("/secret"), false),
            ("/x/../public/%61?q=%2F", Some("/public/a?q=%2F"), true),
            ("//public/a", Some("/public/a"), true),
            ("/public/..%2fsecret", None, false),
            ("/public/%5c..%5csecret", None, false),
            ("/public/%252e%252e/secret", None, false),
            ("/public/..;/secret", None, false),
            ("/public/%00", None, false),
        ] {
            log.borrow_mut().clear();
            let got = world.ask("ok.test", get("ok.test", sent).body("").expect("")).await;
            match arrives {
                Some(target) => {
                    assert_eq!(got.status, 200, "{sent}");
                    let seen = log.borrow()[0].clone();
                    assert_eq!(seen.target, target, "{sent}");
                    assert_eq!(seen.header("authorization").is_some(), with, "{sent}");
                }
                None => {
                    assert_eq!((got.status, got.deny()), (400, "path_ambiguous"), "{sent}");
                    assert!(log.borrow().is_empty(), "{sent}");
                }
            }
        }
    });
    refused(
        "40",
        400,
        Reason::HttpInvalid,
        &[
            "GET /a#b HTTP/1.1\r\nHost: ok.test\r\n\r\n",
            "GET /\u{e4} HTTP/1.1\r\nHost: ok.test\r\n\r\n",
        ],
    );
}

#[test]
fn case_43_each_request_of_a_connection_is_judged() {
    run(|| async {
        let (world, log) = world().await;
        let bytes = "GET /1 HTTP/1.1\r\nHost: ok.test\r\n\r\nGET /2 HTTP/1.1\r\nHost: evil.test\r\n\r\n\
                     GET /3 HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n";
        let got = world.raw("ok.test", bytes).await;
        let statuses: Vec<_> =
            got.match_indices("HTTP/1.1 ").map(|(n, _)| &got[n + 9..n + 12]).collect();
        assert_eq!(statuses, ["200", "421", "200"], "{got}");
        let targets: Vec<_> = log.borrow().iter().map(|s| s.target.clone()).collect();
        assert_eq!(targets, ["/1", "/3"]);
    });
}

#[test]
fn a_bad_request_behind_a_good_one_does_not_take_its_answer() {
    run(|| async {
        let (world, log) = world().await;
        let bytes = "GET /1 HTTP/1.1\r\nHost: ok.test\r\n\r\nGET /2 HTTP/1.1\nHost: ok.test\n\n";
        let got = world.raw("ok.test", bytes).await;
        assert!(got.starts_with("HTTP/1.1 200 "), "{got}");
        assert!(got.contains("HTTP/1.1 400 "), "{got}");
        assert_eq!(log.borrow().len(), 1);
    });
}

#[test]
fn a_bad_request_behind_a_refused_one_does_not_take_its_answer() {
    run(|| async {
        let (world, log) = world().await;
        for first in [
            "GET /1 HTTP/1.1\r\nHost: evil.test\r\n\r\n",
            "TRACE / HTTP/1.1\r\nHost: ok.test\r\n\r\n",
        ] {
            let got =
                world.raw("ok.test", &format!("{first}GET /2 HTTP/1.1\nHost: ok.test\n\n")).await;
            let statuses: Vec<_> =
                got.match_indices("HTTP/1.1 ").map(|(n, _)| &got[n + 9..n + 12]).collect();
            assert!(statuses == ["421", "400"] || statuses == ["405", "400"], "{got}");
        }
        assert!(log.borrow().is_empty());
    });
}

#[test]
fn case_44_a_body_that_looks_like_a_request_is_a_body() {
    run(|| async {
        let (world, log) = world().await;
        let inner = "GET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n";
        let bytes = format!(
            "GET /1 HTTP/1.1\r\nHost: ok.test\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{inner}",
            inner.len()
        );
        world.raw("ok.test", &bytes).await;
        assert_eq!(log.borrow().len(), 1);
        assert_eq!(log.borrow()[0].body, inner);
    });
}

#[test]
fn case_45_an_expectation_is_met_here_and_once() {
    run(|| async {
        let (world, log) = world().await;
        let mut stream = world.tls("ok.test", &["http/1.1"]).await;
        let head = "POST / HTTP/1.1\r\nHost: ok.test\r\nExpect: 100-continue\r\nContent-Length: 4\r\nConnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).await.expect("sent");
        let interim = read_head(&mut stream).await;
        assert!(interim.starts_with("HTTP/1.1 100 "), "{interim}");
        stream.write_all(b"body").await.expect("sent");
        let mut rest = String::new();
        let _ = stream.read_to_string(&mut rest).await;
        assert!(rest.starts_with("HTTP/1.1 200 "), "{rest}");
        assert_eq!(log.borrow()[0].body, "body");
        assert_eq!(log.borrow()[0].header("expect"), None);
    });
    refused(
        "45",
        417,
        Reason::HttpInvalid,
        &["POST / HTTP/1.1\r\nHost: ok.test\r\nExpect: the-moon\r\nContent-Length: 1\r\n\r\nx"],
    );
}

#[test]
fn case_46_chunks() {
    run(|| async {
        let (world, log) = world().await;
        let head = "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
        let got = world.raw("ok.test", &format!("{head}4;x=y\r\nbody\r\n0\r\n\r\n")).await;
        assert!(got.starts_with("HTTP/1.1 200 "), "{got}");
        assert_eq!(log.borrow()[0].body, "body");
        for bad in [
            "4\nbody\r\n0\r\n\r\n",
            "4\r\nbodyX\r\n0\r\n\r\n",
            "fffffffffffffffff\r\nbody\r\n0\r\n\r\n",
            "-4\r\nbody\r\n0\r\n\r\n",
            "0x4\r\nbody\r\n0\r\n\r\n",
            " 4\r\nbody\r\n0\r\n\r\n",
            "4\r\nbody\n0\r\n\r\n",
        ] {
            let got = world.raw("ok.test", &format!("{head}{bad}")).await;
            assert!(!got.starts_with("HTTP/1.1 200 "), "{bad:?}: {got}");
        }
        assert_eq!(log.borrow().len(), 1, "{:?}", log.borrow());
    });
}

#[test]
fn case_47_trailers_do_not_pass() {
    run(|| async {
        let (world, log) = world().await;
        let bytes = "POST / HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: chunked\r\nTrailer: authorization\r\n\
                     Connection: close\r\n\r\n4\r\nbody\r\n0\r\nAuthorization: mine\r\nHost: evil.test\r\n\r\n";
        let got = world.raw("ok.test", bytes).await;
        assert!(got.starts_with("HTTP/1.1 200 "), "{got}");
        let seen = log.borrow()[0].clone();
        assert_eq!(seen.body, "body");
        assert!(seen.trailers.as_ref().is_none_or(http::HeaderMap::is_empty));
        assert_eq!(seen.header("authorization"), Some(CANARY));
    });
}

#[test]
fn case_48_headers_that_are_too_many_or_too_long() {
    let many: String = (0..101).map(|n| format!("X-{n}: y\r\n")).collect();
    let many = format!("GET / HTTP/1.1\r\nHost: ok.test\r\n{many}\r\n");
    let long = format!("GET / HTTP/1.1\r\nHost: ok.test\r\nX: {}\r\n\r\n", "y".repeat(70_000));
    let endless = format!("GET /{}", "y".repeat(70_000));
    refused("48", 431, Reason::HeadersTooLarge, &[&many, &long, &endless]);
}

#[test]
fn case_49_answers_that_are_no_http() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let answers = Rc::new(std::cell::RefCell::new(Vec::<String>::new()));
        let next = Rc::clone(&answers);
        let tls = world.root.server("ok.test", &["http/1.1"], |_| ());
        let origin = raw_origin(tls, move |mut stream| {
            let answer = next.borrow_mut().pop().unwrap_or_default();
            async move {
                read_head(&mut stream).await;
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        })
        .await;
        world.place("ok.test", 443, origin);
        let interim = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n".repeat(200);
        let fine = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        for bad in [
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
                .to_owned(),
            "HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n".to_owned(),
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx".to_owned(),
            "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n".to_owned(),
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
                .to_owned(),
            "SSH-2.0-OpenSSH\r\n".to_owned(),
            String::new(),
            interim.clone(),
            format!("{interim}{fine}"),
        ] {
            answers.borrow_mut().push(bad.clone());
            let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
            let short = &bad[..bad.len().min(90)];
            assert_eq!((got.status, got.deny()), (502, "upstream_protocol"), "{short}");
        }
        // A few interim answers are ordinary.
        let some = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n".repeat(3);
        answers.borrow_mut().push(format!("{some}{fine}"));
        let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        assert_eq!(got.status, 200);
    });
}

#[test]
fn case_50_old_versions() {
    refused(
        "50",
        400,
        Reason::HttpInvalid,
        &[
            "GET /\r\n\r\n",
            "GET / HTTP/0.9\r\nHost: ok.test\r\n\r\n",
            "GET / HTTP/2.0\r\nHost: ok.test\r\n\r\n",
            "GET / HTTP/1.2\r\nHost: ok.test\r\n\r\n",
        ],
    );
    run(|| async {
        let (world, log) = world().await;
        // The connection is closed although the guest asked to keep it.
        let bytes = "GET /1 HTTP/1.0\r\nHost: ok.test\r\nConnection: keep-alive\r\n\r\nGET /2 HTTP/1.0\r\nHost: ok.test\r\n\r\n";
        let got = world.raw("ok.test", bytes).await;
        assert!(got.contains(" 200 OK\r\n"), "{got}");
        assert_eq!(log.borrow().len(), 1);
    });
}

#[test]
fn case_51_nothing_is_put_into_plain_http() {
    run(|| async {
        let policy = json!({"plainHttp": true, "allow": {
            "ok.test": [{"transform": [{"headers": {"authorization": CANARY}}]}],
            "answered.test:80": [{"response": {"statusCode": 403}}],
            "plain.test": []
        }});
        let world = World::new(&policy);
        let (address, log) = origin(None, |_| Response::new(text("plain"))).await;
        for host in ["ok.test", "plain.test", "answered.test"] {
            world.place(host, 80, address);
        }
        let ask = async |host: &str| {
            let mut tcp = world.tcp(None, 80).await;
            let bytes = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
            tcp.write_all(bytes.as_bytes()).await.expect("sent");
            let mut all = String::new();
            let _ = tcp.read_to_string(&mut all).await;
            all
        };
        for host in ["ok.test", "plain.test"] {
            let got = ask(host).await;
            assert!(got.starts_with("HTTP/1.1 200 ") && got.ends_with("plain"), "{host}: {got}");
        }
        assert!(log.borrow().iter().all(|s| s.header("authorization").is_none()));
        assert!(ask("answered.test").await.starts_with("HTTP/1.1 403 "));
        let got = ask("evil.test").await;
        assert!(got.starts_with("HTTP/1.1 403 ") && got.contains("domain_not_listed"), "{got}");
        let got = ask("203.0.113.66").await;
        assert!(got.starts_with("HTTP/1.1 421 "), "{got}");
        assert_eq!(log.borrow().len(), 2);
        assert_eq!(*world.around.dialled.borrow(), ["ok.test:80", "plain.test:80"]);
        let mut off = policy;
        off["plainHttp"] = json!(false);
        world.replace(&off);
        let got = ask("plain.test").await;
        assert!(got.contains("x-bivouac-deny: plain_http"), "{got}");
    });
}

#[test]
fn case_52_a_redirection_is_handed_on_and_not_followed() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        world
            .at("ok.test", &["http/1.1"], |_| {
                let answer =
                    Response::builder().status(302).header("location", "https://evil.test/");
                answer.body(text("")).expect("an answer")
            })
            .await;
        let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        assert_eq!(got.status, 302);
        assert_eq!(got.headers["location"], "https://evil.test/");
        assert_eq!(*world.around.dialled.borrow(), ["ok.test:443"]);
    });
}

#[test]
fn case_53_headers_of_proxies_and_other_roads_are_taken_out_of_answers() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        world
            .at("ok.test", &["http/1.1"], |_| {
                Response::builder()
                    .status(401)
                    .header("www-authenticate", "Basic")
                    .header("proxy-authenticate", "Basic")
                    .header("alt-svc", "h3=\":443\"")
                    .header("x-bivouac-deny", "a lie")
                    .header("connection", "x-hop")
                    .header("x-hop", "gone")
                    .body(text("no"))
                    .expect("an answer")
            })
            .await;
        let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        assert_eq!((got.status, got.body.as_str()), (401, "no"));
        assert_eq!(got.headers["www-authenticate"], "Basic");
        for gone in ["proxy-authenticate", "alt-svc", "x-bivouac-deny", "x-hop"] {
            assert!(!got.headers.contains_key(gone), "{gone}");
        }
    });
}

#[test]
fn case_63_prior_knowledge_of_http2_without_tls() {
    run(|| async {
        let world = World::new(&json!({"plainHttp": true, "allow": ["ok.test"]}));
        let mut tcp = world.tcp(None, 80).await;
        tcp.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("sent");
        let mut all = String::new();
        let _ = tcp.read_to_string(&mut all).await;
        assert!(all.starts_with("HTTP/1.1 400 "), "{all}");
        assert!(world.around.dialled.borrow().is_empty());
    });
}

#[test]
fn a_head_has_its_length_and_no_body() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        for alpn in [&["http/1.1"][..], &["h2"]] {
            world.at("ok.test", alpn, |_| Response::new(text("four"))).await;
            world.interception.forget();
            world.replace(&inject("authorization", CANARY));
            let head = Request::head("/").header("host", "ok.test").body("").expect("");
            let got = world.ask("ok.test", head).await;
            assert_eq!((got.status, got.body.as_str()), (200, ""), "{alpn:?}");
            assert_eq!(got.headers["content-length"], "4", "{alpn:?}");
        }
    });
}
