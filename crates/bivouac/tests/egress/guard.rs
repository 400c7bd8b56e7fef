//! Cases 91, 95, 96 and 120: the broker's own process and sockets, seen from the sandbox and from a
//! neighbour on the host.

use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};

use bivouac_testkit::{LONG, TestSandbox, eventually};
use serde_json::json;

use crate::tools::{PLAYED, attack};
use crate::{Bed, fresh};

/// The shim of a session.
pub(crate) fn shim(sandbox: &TestSandbox) -> i32 {
    let folder = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    folder
        .filter_map(|entry| entry.file_name().to_string_lossy().parse::<i32>().ok())
        .find(|pid| {
            let text = |file: &str| {
                std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default()
            };
            text("cgroup").contains(&sandbox.session) && text("comm").trim() == "bivouac-shim"
        })
        .expect("the session's shim")
}

#[tokio::test]
async fn case_91_the_listener_cannot_be_stolen() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    // Every way to be there first or as well, by root, for both families; whoever is reached says so.
    let script = "import socket,threading,itertools,time\n\
        held=[]\n\
        def serve(s):\n\
        \x20while True:\n\
        \x20 c=s.accept()[0]; open('/tmp/stolen','a').write('x'); c.sendall(b'stolen'); c.close()\n\
        options=[(),((1,2),),((1,15),),((1,2),(1,15)),((0,19),),((0,15),),((0,19),(1,15),(1,2))]\n\
        for (family,addresses) in ((socket.AF_INET,('0.0.0.0','203.0.113.91','10.254.0.1')),(socket.AF_INET6,('::','2001:db8:7::91'))):\n\
        \x20for address,port,chosen in itertools.product(addresses,(443,53,80,7),options):\n\
        \x20 try:\n\
        \x20  s=socket.socket(family); [s.setsockopt(l,o,1) for l,o in chosen]\n\
        \x20  s.bind((address,port)); s.listen(); held.append(s); threading.Thread(target=serve,args=(s,),daemon=True).start()\n\
        \x20 except OSError: pass\n\
        print('bound',len(held),flush=True); time.sleep(600)";
    let thief = sandbox.start(&["python3", "-u", "-c", script], json!({"sudo": true})).await;
    crate::lifecycle::says(&sandbox, &thief, "bound").await;
    for address in ["203.0.113.91", "2001:db8:7::91", PLAYED] {
        let answer = attack(&sandbox, &["hello", address, &name, "whole"]).await;
        assert_eq!(answer["answered"], true, "{address}: {answer}");
        let answer =
            attack(&sandbox, &["tcp", address, "80", "GET / HTTP/1.0\\r\\n\\r\\n", "5"]).await;
        assert_ne!(answer["got"], "stolen", "{address}: {answer}");
    }
    let answer = attack(&sandbox, &["dns", "9.9.9.9", &name, "A", "tcp"]).await;
    assert_eq!(answer["code"], 0, "{answer}");
    assert_ne!(sandbox.sudo("test -e /tmp/stolen").await.exit, Some(0), "a flow was stolen");
    // The control: it does listen, for those who mean the sandbox itself.
    let answer = attack(&sandbox, &["tcp", "127.0.0.1", "443", "x", "5"]).await;
    assert_eq!(answer["got"], "stolen", "{answer}");
}

#[tokio::test]
async fn case_120_the_brokers_memory_is_nobodys_else() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"allow": ["only.test"]})).await;
    let pid = shim(&sandbox);
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let id = |key: &str| -> u32 {
        let line = status.lines().find_map(|l| l.strip_prefix(key)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let (uid, gid) = (id("Uid:"), id("Gid:"));
    assert!(uid > 1 << 29);
    // Not dumpable: its files belong to root, not to its own id.
    assert_eq!(std::fs::metadata(format!("/proc/{pid}/environ")).unwrap().uid(), 0);
    // A process of the very same id may not look.
    let as_it = |line: &str| {
        Command::new("setpriv")
            .args([
                &format!("--reuid={uid}"),
                &format!("--regid={gid}"),
                "--clear-groups",
                "--inh-caps=-all",
            ])
            .args(["sh", "-c", line])
            .stderr(Stdio::null())
            .output()
            .unwrap()
    };
    for file in ["mem", "environ", "maps", "fd/0", "stack", "auxv"] {
        let looked = as_it(&format!("head -c 1 /proc/{pid}/{file}"));
        assert!(!looked.status.success() && looked.stdout.is_empty(), "{file}");
    }
    // The control: the same id may look at a process of its own.
    let own = as_it(
        "sleep 30 & head -c 1 /proc/$!/environ >/dev/null && head -c 1 /proc/$!/maps; kill $!",
    );
    assert!(!own.stdout.is_empty(), "{own:?}");
}

#[tokio::test]
async fn cases_95_and_96_no_socket_of_the_host_is_within_reach() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    // On the host's side, in the namespace where the engine runs: an abstract and a named socket.
    let name = format!("bivouac-abstract-{}", std::process::id());
    let path = bed.folder().join("host.sock");
    let script = "import socket,sys,time\n\
        a=socket.socket(socket.AF_UNIX); a.bind('\\0'+sys.argv[1]); a.listen()\n\
        b=socket.socket(socket.AF_UNIX); b.bind(sys.argv[2]); b.listen()\n\
        time.sleep(600)";
    let mut host = Command::new("python3")
        .args(["-c", script, &name])
        .arg(&path)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the sockets", LONG, async || if path.exists() { Ok(()) } else { Err("no") }).await;
    let try_abstract = format!(
        "import socket\ns=socket.socket(socket.AF_UNIX)\n\
        try:\n\x20s.connect('\\0{name}'); print('reached')\n\
        except OSError as e: print('refused')"
    );
    let inside = sandbox.run_with(&["python3", "-c", &try_abstract], json!({"sudo": true})).await;
    let outside = Command::new("python3").args(["-c", &try_abstract]).output().unwrap();
    // All named sockets that can be seen inside, with whether one can connect.
    let list =
        "find / -xdev -type s 2>/dev/null; find /run /tmp /dev /var -type s 2>/dev/null; true";
    let named = sandbox.sudo(list).await.good();
    let _ = host.kill();
    let _ = host.wait();
    assert_eq!(inside.good(), "refused");
    assert_eq!(String::from_utf8_lossy(&outside.stdout).trim(), "reached", "the control");
    assert_eq!(named, "", "sockets are visible inside");
}
