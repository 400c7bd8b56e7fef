//! `bivouac ports` and `bivouac open`: what listens in a sandbox, who may come, links.
//!
//! Invariant: a link is printed and given to a browser, and to nobody else: never as an argument of a program,
//! which everybody on the machine can read.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::args::{Global, Open, Ports, PortsVerb};
use super::client::{Client, random_word};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::{clock, output, parse, sandbox};

/// How long a browser may take to ask for the link.
const BROWSER: Duration = Duration::from_secs(20);

fn path(name: &str) -> String {
    format!("/bivouac/v1/sandboxes/{name}/ports")
}

/// Does what the verb below `ports` says.
pub(crate) async fn run(global: &Global, args: Ports) -> Outcome {
    let client = Client::find(global)?;
    match (args.what, args.name) {
        (None, Some(name)) => list(global, &client, &name).await,
        (None, None) => Err(Failure::usage("of which sandbox?")),
        (Some(PortsVerb::Publish(one)), _) => {
            publish(global, &client, &one.name, one.port, true).await
        }
        (Some(PortsVerb::Unpublish(one)), _) => {
            publish(global, &client, &one.name, one.port, false).await
        }
        (Some(PortsVerb::Link { port, ttl }), _) => {
            let link = link(&client, &port.name, port.port, ttl).await?;
            show(global, &link)
        }
        (Some(PortsVerb::Revoke { name, port }), _) => {
            let body = port.map_or_else(|| json!({}), |port| json!({ "port": port }));
            let path = format!("{}/revoke", path(&name));
            let answer = client.post(&path, &client.scope(), &body).await?;
            if global.json {
                output::json(&answer)?;
            } else {
                output::progress(&format!("links to {name} are worth nothing any more"));
            }
            Ok(ExitStatus::Success)
        }
    }
}

async fn ports(client: &Client, name: &str) -> Outcome<Vec<Value>> {
    let mut answer = client.get(&path(name), &client.scope()).await?;
    match answer["ports"].take() {
        Value::Array(ports) => Ok(ports),
        _ => Err(Failure::new("the engine's answer has no ports")),
    }
}

async fn list(global: &Global, client: &Client, name: &str) -> Outcome {
    let ports = ports(client, name).await?;
    if global.json {
        output::json(&ports.into())?;
        return Ok(ExitStatus::Success);
    }
    let rows = ports.iter().map(row).collect();
    output::table(&["PORT", "LISTENS", "PROGRAM", "ACCESS", "URL"], rows)?;
    if ports.is_empty() {
        output::hint("nothing listens, and no port is declared (bivouac create NAME -p PORT)");
    } else {
        output::hint(&format!("a link to see one: bivouac open {name} PORT"));
    }
    Ok(ExitStatus::Success)
}

fn row(port: &Value) -> Vec<String> {
    let word = |key: &str| port[key].as_str().unwrap_or("-").to_owned();
    let program = match (port["program"].as_str(), port["pid"].as_i64()) {
        (Some(program), Some(pid)) => format!("{program} ({pid})"),
        (Some(program), None) => program.to_owned(),
        _ => "-".to_owned(),
    };
    let access = if port["public"] == true { "public" } else { "private" };
    let number = port["port"].as_u64().unwrap_or_default().to_string();
    vec![number, word("address"), program, access.to_owned(), word("url")]
}

async fn publish(global: &Global, client: &Client, name: &str, port: u16, public: bool) -> Outcome {
    let path = format!("{}/{port}", path(name));
    let answer = client.put(&path, &client.scope(), &json!({ "public": public })).await?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    output::line(sandbox::text(&answer, "/port/url")?.as_str())?;
    output::progress(&match public {
        true => format!("port {port} of {name} is open to everybody who has that address"),
        false => format!("port {port} of {name} is private"),
    });
    Ok(ExitStatus::Success)
}

async fn link(client: &Client, name: &str, port: u16, ttl: Option<Duration>) -> Outcome<Value> {
    let body = ttl.map_or_else(|| json!({}), |ttl| json!({ "ttl": parse::millis(ttl) }));
    let path = format!("{}/{port}/link", path(name));
    Ok(client.post(&path, &client.scope(), &body).await?)
}

fn show(global: &Global, link: &Value) -> Outcome {
    if global.json {
        output::json(link)?;
        return Ok(ExitStatus::Success);
    }
    output::line(&sandbox::text(link, "/url")?)?;
    if let Some(until) = link["expiresAt"].as_i64() {
        // To the second: a link for an hour shall not be called one for 59 minutes.
        let left = clock::span(until - clock::now_ms() + 999);
        output::progress(&format!("whoever has this link gets in for {left}"));
    }
    Ok(ExitStatus::Success)
}

/// Makes a link, prints it, and has a browser open it where there is one.
pub(crate) async fn open(global: &Global, args: Open) -> Outcome {
    let client = Client::find(global)?;
    let port = match args.port {
        Some(port) => port,
        None => only(&args.name, &ports(&client, &args.name).await?)?,
    };
    let link = link(&client, &args.name, port, args.ttl).await?;
    let status = show(global, &link)?;
    if !args.print
        && !global.json
        && let Some(browser) = browser()
    {
        let url = sandbox::text(&link, "/url")?;
        if let Err(failure) = hand_over(browser, &url).await {
            output::hint(&format!("open the link yourself: {}", failure.summary()));
        }
    }
    Ok(status)
}

/// The port that is meant when none is named.
fn only(name: &str, ports: &[Value]) -> Outcome<u16> {
    let number = |port: &Value| port["port"].as_u64().and_then(|port| u16::try_from(port).ok());
    let of = |wanted: &dyn Fn(&Value) -> bool| -> Vec<u16> {
        ports.iter().filter(|port| wanted(port)).filter_map(number).collect()
    };
    let both = of(&|port| port["declared"] == true && port["listening"] == true);
    let (declared, listening) = (of(&|p| p["declared"] == true), of(&|p| p["listening"] == true));
    for found in [&both, &listening, &declared] {
        if let [port] = found.as_slice() {
            return Ok(*port);
        }
    }
    let all: Vec<String> = of(&|_| true).iter().map(u16::to_string).collect();
    if all.is_empty() {
        return Err(Failure::new(format!("nothing listens in {name}, and no port is declared"))
            .hint("start a program in it, then look: bivouac ports NAME"));
    }
    Err(Failure::usage(format!("{name} has more than one port: {}", all.join(", ")))
        .hint(format!("name one: bivouac open {name} {}", all[0])))
}

/// A program that opens a browser on the desktop that we are on, if we are on one.
fn browser() -> Option<&'static str> {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if !set("DISPLAY") && !set("WAYLAND_DISPLAY") {
        return None;
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .any(|folder| folder.join("xdg-open").is_file())
        .then_some("xdg-open")
}

/// Sends the browser to the link by way of an address that is good once, because arguments are public.
#[expect(clippy::disallowed_methods, reason = "a client with one thread starts a browser")]
async fn hand_over(browser: &str, url: &str) -> Outcome<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))
        .await
        .explain(|| "could not listen for the browser".to_owned())?;
    let at = listener.local_addr().explain(|| "no address".to_owned())?;
    let once = format!("/{}", random_word()?);
    let mut child = tokio::process::Command::new(browser)
        .arg(format!("http://{at}{once}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .explain(|| format!("could not start {browser}"))?;
    let asked = tokio::time::timeout(BROWSER, async {
        loop {
            let Ok((mut stream, _)) = listener.accept().await else { continue };
            let mut head = [0; 1024];
            let read = tokio::time::timeout(Duration::from_secs(2), stream.read(&mut head)).await;
            let Ok(Ok(length)) = read else { continue };
            let wanted = format!("GET {once} ");
            let ours = head[..length].starts_with(wanted.as_bytes());
            let answer = if ours {
                format!(
                    "HTTP/1.1 302 Found\r\nLocation: {url}\r\nReferrer-Policy: no-referrer\r\n\
                     Cache-Control: no-store\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
            } else {
                "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    .to_owned()
            };
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.shutdown().await;
            if ours {
                return;
            }
        }
    });
    let asked = asked.await;
    // It is done with its part by now; a browser that it became goes on by itself.
    let _ = child.try_wait();
    asked.explain(|| "no browser has come".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_port_is_meant() {
        let port = |port: u16, declared: bool, listening: bool| json!({ "port": port, "declared": declared, "listening": listening });
        let of = |ports: &[Value]| only("box", ports).ok();
        assert_eq!(of(&[port(1, true, false), port(2, true, true), port(3, false, true)]), Some(2));
        assert_eq!(of(&[port(1, true, false), port(3, false, true)]), Some(3));
        assert_eq!(of(&[port(1, true, false)]), Some(1));
        assert_eq!(of(&[port(1, true, true), port(2, true, true)]), None);
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn rows_stand_what_may_be_absent() {
        let full = json!({ "port": 3000, "address": "::", "program": "node", "pid": 7,
            "public": true, "url": "http://x" });
        assert_eq!(row(&full), ["3000", "::", "node (7)", "public", "http://x"]);
        assert_eq!(row(&json!({ "port": 1, "public": false })), ["1", "-", "-", "private", "-"]);
    }
}
