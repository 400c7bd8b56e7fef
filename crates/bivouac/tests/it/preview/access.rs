//! Who is let in, and for how long.

use bivouac_testkit::{LONG, eventually};
use reqwest::Method;
use serde_json::json;

use super::{Site, ended, read, says, websocket};

#[tokio::test]
async fn a_port_is_closed_to_strangers_and_says_how_to_get_in() {
    let site = Site::new("prev-closed").await;
    let got = site.ask("GET", "/echo", "").await;
    assert_eq!(got.is(401).json()["error"]["code"], "unauthorized");
    assert!(got.header("www-authenticate").is_some());
    let page = site.ask("GET", "/echo", "Accept: text/html,*/*\r\n").await;
    assert!(page.is(401).text().contains("bivouac open site 3000"), "{}", page.text());
    assert!(page.header("content-security-policy").unwrap().contains("default-src 'none'"));
    assert!(site.ask("HEAD", "/echo", "Accept: text/html\r\n").await.is(401).body.is_empty());
    for bad in [
        "x-bivouac-token: nonsense\r\n",
        "Authorization: Bearer nonsense\r\n",
        "Cookie: _bivouac=x\r\n",
    ] {
        let _ = site.ask("GET", "/echo", bad).await.is(401);
    }
    let _ = site.ask("GET", "/echo?__bivouac=1.0..AAAA", "").await.is(401);
    assert_eq!(site.sandbox.sh("true").await.exit, Some(0));
}

#[tokio::test]
async fn a_token_lets_in_and_is_not_shown_to_the_program() {
    let site = Site::new("prev-token").await;
    let got = site.token("GET", "/echo", "Authorization: Basic dTpw\r\n").await;
    let seen = got.is(200).seen();
    assert!(seen.contains(&"authorization: basic dtpw".to_owned()), "{seen:?}");
    assert!(!seen.iter().any(|line| line.contains("bivouac")), "{seen:?}");
    let bearer = format!("Authorization: Bearer {}\r\n", site.server.token);
    let seen = site.ask("GET", "/echo", &bearer).await.is(200).seen();
    assert!(!seen.iter().any(|line| line.starts_with("authorization")), "{seen:?}");
    // Somebody else's is the program's.
    site.publish(true).await;
    let seen = site.ask("GET", "/echo", "Authorization: Bearer own\r\n").await.is(200).seen();
    assert!(seen.contains(&"authorization: bearer own".to_owned()), "{seen:?}");
}

#[tokio::test]
async fn a_token_needs_the_right_and_the_namespace() {
    let site = Site::new("prev-right").await;
    let make = async |name: &str, namespaces: &str, verbs: &[&str]| {
        let body = json!({ "name": name, "namespaces": [namespaces], "verbs": verbs });
        let made = site.client.post("/api/bivouac/v1/tokens", &body).await;
        assert_eq!(made.status, 201, "{made}");
        made.json["secret"]
            .as_str()
            .or(made.json["token"].as_str())
            .unwrap_or_else(|| panic!("{made}"))
            .to_owned()
    };
    let good = make("prev-good", "prev-right/*", &["preview"]).await;
    let blind = make("prev-blind", "prev-right/*", &["read", "exec"]).await;
    let other = make("prev-other", "prev-else/*", &["preview"]).await;
    let ask = async |token: &str| {
        site.ask("GET", "/echo", &format!("x-bivouac-token: {token}\r\n")).await
    };
    let _ = ask(&good).await.is(200);
    let _ = ask(&blind).await.is(403);
    let _ = ask(&other).await.is(401);
    // A token that is revoked: at once, also for what is open, and its links with it.
    let mut open =
        site.raw(websocket(&site.host, &format!("x-bivouac-token: {good}\r\n")).as_bytes()).await;
    let _ = read(&mut open, true).await.is(101);
    says(&mut open, "hello").await;
    let request = site.client.with_token(&good).request(Method::POST, &site.own("ports/3000/link"));
    let linked = site.client.send(request.json(&json!({}))).await.ok();
    let query = linked["url"].as_str().unwrap().split_once('?').unwrap().1.to_owned();
    let _ = site.ask("GET", &format!("/echo?{query}"), "").await.is(302);
    let gone = site.client.delete("/api/bivouac/v1/tokens/prev-good").await;
    assert!(gone.status < 300, "{gone}");
    let _ = ask(&good).await.is(401);
    let _ = site.ask("GET", &format!("/echo?{query}"), "").await.is(401);
    ended(&mut open).await;
}

#[tokio::test]
async fn a_link_becomes_a_cookie_that_nobody_else_sees() {
    let site = Site::new("prev-link").await;
    let query = site.link(json!({ "ttl": 600_000 })).await;
    let got = site.ask("GET", &format!("//evil.example/a?b=1&{query}&c"), "").await;
    let port = site.address().port();
    let clean = format!("http://{}//evil.example/a?b=1&c", site.host);
    assert_eq!(got.is(302).header("location"), Some(clean.as_str()), "{port}");
    let cookie = got.header("set-cookie").unwrap().to_owned();
    for word in ["HttpOnly", "SameSite=Lax", "Path=/", "Max-Age="] {
        assert!(cookie.contains(word), "{cookie}");
    }
    assert!(!cookie.contains("Domain") && !cookie.contains("Secure"), "{cookie}");
    assert_eq!(got.header("referrer-policy"), Some("no-referrer"));
    let pair = cookie.split(';').next().unwrap();
    let with = format!("Cookie: a=1; {pair}; b=2\r\n");
    let seen = site.ask("GET", "/echo?__bivouac=old&x=1", &with).await;
    assert!(
        seen.is(302).header("location").unwrap().ends_with("/echo?x=1"),
        "a page is asked for again"
    );
    let seen = site.ask("POST", "/echo?__bivouac=old&x=1", &with).await.is(200).seen();
    assert_eq!(seen[0], "post /echo?x=1 http/1.1");
    assert!(seen.contains(&"cookie: a=1; b=2".to_owned()), "{seen:?}");
    // Not for another route, nor a cookie as a link, nor one that was changed.
    let text = pair.split_once('=').unwrap().1;
    let _ = site.ask("GET", &format!("/echo?__bivouac={text}"), "").await.is(401);
    let changed = text.replacen(text.chars().next().unwrap(), "9", 1);
    let _ = site.ask("GET", "/echo", &format!("Cookie: _bivouac={changed}\r\n")).await.is(401);
    // Links end by themselves.
    let short = site.link(json!({ "ttl": 1000 })).await;
    eventually("the link expires", LONG, async || {
        let got = site.ask("GET", &format!("/echo?{short}"), "").await;
        (got.status == 401).then_some(()).ok_or(got.status)
    })
    .await;
    let refused = site.client.post(&site.own("ports/3000/link"), &json!({ "ttl": 5 })).await;
    let _ = refused.refused(400, "bad_request");
}

#[tokio::test]
async fn what_is_revoked_or_closed_is_cut_at_once() {
    let site = Site::new("prev-cut").await;
    let cookie = site.cookie().await;
    let with = format!("Cookie: {cookie}\r\n");
    let mut socket = site.raw(websocket(&site.host, &with).as_bytes()).await;
    let head = read(&mut socket, true).await;
    assert_eq!(head.is(101).header("x-host"), Some(site.host.as_str()));
    says(&mut socket, "one").await;
    let events = format!("GET /events HTTP/1.1\r\nHost: {}\r\n{with}\r\n", site.host);
    let mut events = site.raw(events.as_bytes()).await;
    let mut own = site
        .raw(
            websocket(&site.host, &format!("x-bivouac-token: {}\r\n", site.server.token))
                .as_bytes(),
        )
        .await;
    let _ = read(&mut own, true).await.is(101);
    let answer = site.client.post(&site.own("ports/revoke"), &json!({ "port": 3000 })).await;
    assert_eq!(answer.status, 200, "{answer}");
    let _ = site.ask("GET", "/echo", &with).await.is(401);
    ended(&mut socket).await;
    ended(&mut events).await;
    says(&mut own, "the owner's goes on").await;
    // Open, and closed again.
    site.publish(true).await;
    let _ = site.ask("GET", "/echo", "").await.is(200);
    let mut stranger = site.raw(websocket(&site.host, "").as_bytes()).await;
    let _ = read(&mut stranger, true).await.is(101);
    says(&mut stranger, "two").await;
    site.publish(false).await;
    let _ = site.ask("GET", "/echo", "").await.is(401);
    ended(&mut stranger).await;
    says(&mut own, "and on").await;
    // A route that is taken away takes all along.
    let path = format!("/v2/sandboxes/{}", site.sandbox.name);
    let _ = site.client.patch(&path, &json!({ "ports": [4000] })).await.ok();
    ended(&mut own).await;
    let _ = site.token("GET", "/echo", "").await.is(404);
}

#[tokio::test]
async fn a_page_of_a_neighbour_gets_nothing_by_the_cookie() {
    let site = Site::new("prev-near").await;
    let cookie = site.cookie().await;
    let ask = async |method: &str, more: &str| {
        site.ask(method, "/echo", &format!("Cookie: {cookie}\r\n{more}")).await.status
    };
    let own = format!("Origin: http://{}:{}\r\n", site.host, site.address().port());
    let ports = site.client.get(&site.own("ports")).await.ok();
    let listed = ports["ports"].as_array().unwrap();
    assert_eq!(listed[0]["port"], 3000);
    assert_eq!(ask("POST", &own).await, 200);
    assert_eq!(ask("GET", "Sec-Fetch-Site: same-origin\r\n").await, 200);
    assert_eq!(ask("GET", "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n").await, 200);
    for other in [
        "Origin: http://sb-other.localhost\r\n",
        "Origin: https://evil.example\r\n",
        "Origin: null\r\n",
        "Sec-Fetch-Site: same-site\r\nSec-Fetch-Mode: no-cors\r\n",
        "Sec-Fetch-Site: cross-site\r\n",
    ] {
        assert_eq!(ask("GET", other).await, 403, "{other}");
    }
    let more = format!("Cookie: {cookie}\r\nOrigin: http://sb-other.localhost\r\n");
    let mut socket = site.raw(websocket(&site.host, &more).as_bytes()).await;
    let _ = read(&mut socket, false).await.is(403);
}
