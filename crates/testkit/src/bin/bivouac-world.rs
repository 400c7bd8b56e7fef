//! A [`World`] for tests that are not written in Rust: runs one until its standard input closes.
//!
//! Prints one JSON line: `prefix` (a command line that runs a program on the engine's side), `args` (flags
//! for `serve`) and `socket`. On that Unix socket it answers JSON lines:
//! `{"name": …, "addresses": […]}` → `{}`; `{"seen": MARKER}` → `{"seen": […]}`;
//! `{"packets": ADDRESS}` → `{"packets": N}`; `{"queries": NAME}` → `{"queries": N}`;
//! `{"server": [NAME, …]}` → `{"prefix": …, "certificate": PEM, "key": PEM}`: what a test needs to run a
//! server of its own on the side of the origins.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a tool of the tests, whose output is its interface"
)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use bivouac_testkit::{Seen, World};
use serde_json::{Value, json};

fn main() -> Result<()> {
    let world = World::new()?;
    let socket = world.folder().join("control");
    let listener = UnixListener::bind(&socket)?;
    let told = json!({ "prefix": world.prefix(), "args": world.serve_args(), "socket": socket });
    let world = Arc::new(Mutex::new(Some(world)));
    let served = Arc::clone(&world);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let served = served.clone();
            std::thread::spawn(move || serve(&served, &stream));
        }
    });
    println!("{told}");
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    // Taken out from under whoever is just answering: the world ends here and not in a thread that the end of this
    // process cuts off, which would leave its folder behind.
    drop(world.lock().unwrap_or_else(PoisonError::into_inner).take());
    Ok(())
}

/// A connection that stays open does not keep the world.
fn serve(served: &Mutex<Option<World>>, stream: &UnixStream) {
    for line in BufReader::new(stream).lines().map_while(std::result::Result::ok) {
        let reply = {
            let world = served.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(world) = world.as_ref() else { return };
            answer(world, &line).unwrap_or_else(|e| json!({ "error": format!("{e:#}") }))
        };
        let mut out = stream;
        if writeln!(out, "{reply}").is_err() {
            return;
        }
    }
}

fn answer(world: &World, line: &str) -> Result<Value> {
    let asked: Value = serde_json::from_str(line)?;
    if let Some(name) = asked["name"].as_str() {
        let list = asked["addresses"].as_array().context("addresses")?;
        let list: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
        world.name(name, &list);
        return Ok(json!({}));
    }
    if let Some(marker) = asked["seen"].as_str() {
        let seen: Vec<Value> = world.seen_with(marker).iter().map(shown).collect();
        return Ok(json!({ "seen": seen }));
    }
    if let Some(address) = asked["packets"].as_str() {
        return Ok(json!({ "packets": world.wire().to(address).len() }));
    }
    if let Some(names) = asked["server"].as_array() {
        let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
        let (certificate, key) = world.certificate(&names)?;
        let prefix = world.far_prefix();
        return Ok(json!({ "prefix": prefix, "certificate": certificate, "key": key }));
    }
    let name = asked["queries"].as_str().context("an unknown request")?;
    let count = world.queries().iter().filter(|query| query.name == name).count();
    Ok(json!({ "queries": count }))
}

fn shown(seen: &Seen) -> Value {
    json!({
        "at": seen.at.to_string(), "sni": seen.sni, "version": seen.version, "method": seen.method,
        "authority": seen.authority, "target": seen.target, "headers": seen.headers,
        "body": String::from_utf8_lossy(&seen.body),
    })
}
