//! Which TCP ports are listened on inside, and by which process.
//!
//! All of it is the guest's own word (its proc, its names), so each count and length has a bound.
//! Invariant: the answer fits into one frame. Called by [`super::doors`], in a child of init.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::doors::read_bounded;
use crate::Listener;
use crate::proto::Heard;

/// Most sockets that are told of: those with the lowest ports.
const MOST: usize = 256;
/// Most bytes of a table that are read.
const TABLE: u64 = 8 << 20;
/// Most processes, and descriptors in all, that are looked at.
const PROCESSES: usize = 8192;
const DESCRIPTORS: usize = 400_000;
/// Longest name of a program.
const NAME: usize = 64;
/// State of a socket that listens, in the kernel's tables.
const LISTENS: &str = "0A";

/// Everyone who listens.
pub(super) fn all() -> Vec<Heard> {
    let mut heard = Vec::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        let text = read_bounded(table, TABLE).unwrap_or_default();
        heard.extend(text.lines().skip(1).filter_map(entry));
    }
    heard.sort_by(|a, b| {
        (a.listener.port, &a.listener.address).cmp(&(b.listener.port, &b.listener.address))
    });
    heard.truncate(MOST);
    let mut wanted: HashMap<u64, &mut Heard> =
        heard.iter_mut().map(|heard| (heard.inode, heard)).collect();
    find(&mut wanted);
    heard
}

/// One line of a table: `sl local_address rem_address st … uid timeout inode`.
fn entry(line: &str) -> Option<Heard> {
    let mut words = line.split_whitespace();
    let local = words.nth(1)?;
    if words.nth(1)? != LISTENS {
        return None;
    }
    let inode = words.nth(5)?.parse().ok()?;
    let (address, port) = local.split_once(':')?;
    let listener = Listener {
        port: u16::from_str_radix(port, 16).ok()?,
        address: self::address(address)?.to_string(),
        pid: None,
        program: None,
    };
    Some(Heard { listener, inode })
}

/// The kernel writes words of four bytes as numbers of this machine.
fn address(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let text = hex.get(at * 8..at * 8 + 8)?;
        Some(u32::from_str_radix(text, 16).ok()?.to_ne_bytes())
    };
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0u8; 16];
            for (at, piece) in bytes.chunks_exact_mut(4).enumerate() {
                piece.copy_from_slice(&word(at)?);
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

/// Looks for the processes that have these sockets.
fn find(wanted: &mut HashMap<u64, &mut Heard>) {
    let Ok(entries) = std::fs::read_dir("/proc") else { return };
    let (own, mut seen) = (std::process::id(), 0);
    let names = entries.flatten().take(2 * PROCESSES).filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        // PID 1 is the engine's own.
        (pid > 1 && pid != own).then_some(pid)
    });
    for pid in names.take(PROCESSES) {
        let Ok(fds) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for fd in fds.flatten() {
            seen += 1;
            if wanted.is_empty() || seen > DESCRIPTORS {
                return;
            }
            let Ok(target) = std::fs::read_link(fd.path()) else { continue };
            let inode = target.to_str().and_then(|name| {
                name.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok()
            });
            // The first who has it is the one that made it, or its heir.
            if let Some(heard) = inode.and_then(|inode| wanted.remove(&inode)) {
                heard.listener.pid = i32::try_from(pid).ok();
                heard.listener.program = program(pid);
            }
        }
    }
}

/// The name of a process's program. Runtimes rename their main thread, so the file says more.
fn program(pid: u32) -> Option<String> {
    let file = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let name = file.as_deref().and_then(|file| file.file_name()).map(|name| {
        let name = name.to_string_lossy();
        name.strip_suffix(" (deleted)").unwrap_or(&name).to_owned()
    });
    let name = name.or_else(|| read_bounded(&format!("/proc/{pid}/comm"), 64).ok())?;
    let name: String = name.trim().chars().filter(|c| !c.is_control()).take(NAME).collect();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel() {
        let line = "   0: 0100007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 ffff 100";
        let heard = entry(line).unwrap();
        assert_eq!((heard.listener.port, heard.inode), (3000, 4711));
        assert_eq!(heard.listener.address, "127.0.0.1");
        let six = line.replace("0100007F:", "00000000000000000000000001000000:");
        assert_eq!(entry(&six).unwrap().listener.address, "::1");
        assert_eq!(entry(&line.replace(" 0A ", " 01 ")), None, "connected");
    }

    proptest::proptest! {
        #[test]
        fn garbage_is_no_panic(line: String) {
            let _ = entry(&line);
        }
    }

    /// The answer is one frame at most.
    #[test]
    fn the_most_fits() {
        let listener = Listener {
            port: u16::MAX,
            address: "ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255".to_owned(),
            pid: Some(i32::MAX),
            program: Some("\u{10ffff}".repeat(NAME)),
        };
        let all = vec![Heard { listener, inode: u64::MAX }; MOST];
        let reply = crate::proto::DoorReply::Listeners(all);
        let length = serde_json::to_vec(&reply).unwrap().len();
        assert!(length < crate::linux::doors::REPLY_CAP, "{length}");
    }
}
