//! Which name leads where.

use reqwest::Method;
use serde_json::json;

use super::{Site, read, start_app};

#[tokio::test]
async fn every_form_of_the_name_leads_there_and_no_other_does() {
    let site = Site::new("prev-names").await;
    let token = format!("x-bivouac-token: {}\r\nConnection: close\r\n\r\n", site.server.token);
    let port = site.address().port();
    let upper = site.host.to_ascii_uppercase();
    for head in [
        format!("GET /alive HTTP/1.1\r\nHost: {}:{port}\r\n", site.host),
        format!("GET /alive HTTP/1.1\r\nHost: {upper}.\r\n"),
        format!("GET http://{}/alive HTTP/1.1\r\nHost: {}\r\n", site.host, site.host),
    ] {
        let got = read(&mut site.raw(format!("{head}{token}").as_bytes()).await, false).await;
        assert!(got.is(200).text().parse::<u32>().is_ok(), "{head}");
    }
    // The Host header is the browser's.
    let head = format!("GET /echo HTTP/1.1\r\nHost: {upper}.:{port}\r\n{token}");
    let seen = read(&mut site.raw(head.as_bytes()).await, false).await.is(200).seen();
    assert!(seen.contains(&format!("host: {}.:{port}", site.host)), "{seen:?}");
    assert!(seen.contains(&format!("x-forwarded-host: {}:{port}", site.host)), "{seen:?}");
    for (head, status) in [
        ("GET /alive HTTP/1.1\r\nHost: sb-nobody.localhost\r\n".to_owned(), 404),
        (format!("GET /alive HTTP/1.1\r\nHost: x.{}\r\n", site.host), 404),
        (format!("GET /alive HTTP/1.1\r\nHost: {0}\r\nHost: {0}\r\n", site.host), 400),
        (format!("GET http://127.0.0.1/alive HTTP/1.1\r\nHost: {}\r\n", site.host), 400),
        (format!("GET http://{}/alive HTTP/1.1\r\nHost: 127.0.0.1\r\n", site.host), 400),
        (format!("GET /alive HTTP/1.1\r\nHost: u@{}\r\n", site.host), 400),
        (format!("CONNECT {}:80 HTTP/1.1\r\nHost: {0}:80\r\n", site.host), 405),
        ("GET /alive HTTP/1.1\r\nHost: 127.0.0.1\r\n".to_owned(), 404),
        ("GET /alive HTTP/1.1\r\nHost: [::1]:80\r\n".to_owned(), 404),
    ] {
        let got = read(&mut site.raw(format!("{head}{token}").as_bytes()).await, false).await;
        assert_eq!(got.status, status, "{head}{}", got.text());
    }
}

#[tokio::test]
async fn the_api_is_not_behind_a_route_and_no_route_is_behind_the_api() {
    let site = Site::new("prev-api").await;
    let bearer = format!("Authorization: Bearer {}\r\n", site.server.token);
    for path in
        ["/api/bivouac/v1/engine", "/health", "/metrics", "/api/openapi.json", "/.well-known/jwks"]
    {
        let got = site.token("GET", path, &bearer).await;
        assert_eq!(got.is(200).seen()[0], format!("get {path} http/1.1"), "the program's own");
        assert_eq!(got.header("x-bivouac-version"), None);
        assert_eq!(got.header("x-request-id"), None);
        let _ = site.ask("GET", path, "").await.is(401);
    }
    let request = site.client.request(Method::GET, "/echo");
    assert_eq!(site.client.send(request).await.status, 404);
}

#[tokio::test]
async fn a_port_that_is_not_declared_has_a_name_too_and_stays_private() {
    let site = Site::new("prev-any").await;
    start_app(&site.sandbox, 4111, "0.0.0.0").await;
    let found = bivouac_testkit::eventually("it is listed", bivouac_testkit::LONG, async || {
        let ports = site.client.get(&site.own("ports")).await.ok();
        let ports = ports["ports"].as_array().unwrap().clone();
        ports.iter().find(|port| port["port"] == 4111).cloned().ok_or(ports)
    })
    .await;
    assert_eq!(found["declared"], false);
    assert_eq!(found["public"], false);
    assert!(found["program"].as_str().unwrap().starts_with("python"), "{found}");
    let url = found["url"].as_str().unwrap();
    let host = url.trim_start_matches("http://").split(':').next().unwrap().to_owned();
    assert!(host.starts_with("4111--sb-"), "{host}");
    let at = |host: &str, more: &str| {
        format!("GET /alive HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n")
    };
    let token = format!("x-bivouac-token: {}\r\n", site.server.token);
    let got = read(&mut site.raw(at(&host, &token).as_bytes()).await, false).await;
    let _ = got.is(200);
    let got = read(&mut site.raw(at(&host, "").as_bytes()).await, false).await;
    let _ = got.is(401);
    // Nobody is behind the next one; the answer says so.
    let other = host.replacen("4111", "4112", 1);
    let got = read(&mut site.raw(at(&other, &token).as_bytes()).await, false).await;
    assert!(got.is(502).text().contains("port 4112"), "{}", got.text());
    assert!(got.text().contains("0.0.0.0 or 127.0.0.1"), "{}", got.text());
    // A page of the one may ask the other: they are of one sandbox.
    let link = site.client.post(&site.own("ports/4111/link"), &json!({})).await.ok();
    let query = link["url"].as_str().unwrap().split_once('?').unwrap().1.to_owned();
    let asked = at(&host, "").replacen("/alive", &format!("/alive?{query}"), 1);
    let got = read(&mut site.raw(asked.as_bytes()).await, false).await;
    let cookie = got.is(302).header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
    let more = format!("Cookie: {cookie}\r\nOrigin: http://{}\r\n", site.host);
    let _ = read(&mut site.raw(at(&host, &more).as_bytes()).await, false).await.is(200);
    // Opened, it is declared.
    let opened = site.client.put(&site.own("ports/4111"), &json!({ "public": true })).await.ok();
    assert_eq!(
        (&opened["port"]["declared"], &opened["port"]["public"]),
        (&json!(true), &json!(true))
    );
    let url = opened["port"]["url"].as_str().unwrap();
    let public = url.trim_start_matches("http://").split(':').next().unwrap().to_owned();
    let _ = read(&mut site.raw(at(&public, "").as_bytes()).await, false).await.is(200);
    let _ = read(&mut site.raw(at(&host, "").as_bytes()).await, false).await.is(401);
}
