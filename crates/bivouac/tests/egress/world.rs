//! The world itself: what the other tests rely on, without an engine. Each record has its positive
//! control here.

use std::process::Command;

use bivouac_testkit::{NameAnswer, World};

fn curl(world: &World, args: &[&str]) -> (Option<i32>, String) {
    let prefix = world.prefix();
    let output = Command::new(&prefix[0])
        .args(&prefix[1..])
        .args(["curl", "-sS", "-m", "10"])
        .args(args)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn every_address_answers_and_is_recorded() {
    let world = World::new().unwrap();
    let roots = world.roots().display().to_string();
    for address in ["203.0.113.66", "169.254.169.254", "10.9.9.9", "198.51.100.10"] {
        let (code, said) = curl(&world, &["-d", "canary-body", &format!("http://{address}/hello")]);
        assert_eq!(code, Some(0), "{address}: {said}");
        assert!(world.wire().to(address).iter().any(|p| p.port == 80), "{address}");
    }
    assert_eq!(world.seen_with("canary-body").len(), 4);
    assert!(!world.wire().holding("canary-body").is_empty());
    for (at, host) in [("203.0.113.66", "203.0.113.66"), ("2001:db8:7::1", "[2001:db8:7::1]")] {
        let resolve = format!("ok.test:443:{host}");
        let args = ["--cacert", &roots, "--resolve", &resolve, "https://ok.test/x?y=1"];
        let (code, said) = curl(&world, &args);
        assert_eq!(code, Some(0), "{said}");
        let seen = world.seen_with("/x?y=1");
        let last = seen.last().unwrap();
        assert_eq!((last.sni.as_deref(), last.at.ip().to_string().as_str()), (Some("ok.test"), at));
        assert_eq!((last.version.as_str(), last.authority.as_str()), ("HTTP/2.0", "ok.test"));
    }
}

#[test]
fn the_name_server_answers_as_told() {
    let world = World::new().unwrap();
    world.name("one.test", &["198.51.100.10", "2001:db8:7::1"]);
    world.answer("alias.test", NameAnswer::Alias("one.test".to_owned()));
    world.name("*.wild.test", &["198.51.100.11"]);
    let prefix = world.prefix();
    let ask = |name: &str| {
        let script = "import socket,struct,sys\n\
            q=struct.pack('>6H',7,256,1,0,0,0)+b''.join(bytes([len(l)])+l.encode() for l in sys.argv[1].split('.'))+b'\\0\\0\\1\\0\\1'\n\
            s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM);s.settimeout(5)\n\
            s.sendto(q,('198.51.100.53',53));a=s.recv(512)\n\
            print(a[3]&15,struct.unpack('>H',a[6:8])[0],'.'.join(str(b) for b in a[-4:]))";
        let output = Command::new(&prefix[0])
            .args(&prefix[1..])
            .args(["python3", "-c", script, name])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    assert_eq!(ask("one.test"), "0 1 198.51.100.10");
    assert_eq!(ask("alias.test"), "0 2 198.51.100.10");
    assert_eq!(ask("a.b.wild.test"), "0 1 198.51.100.11");
    assert!(ask("none.test").starts_with("3 0"));
    let names: Vec<_> = world.queries().into_iter().map(|q| q.name).collect();
    assert_eq!(names, ["one.test", "alias.test", "a.b.wild.test", "none.test"]);
}
