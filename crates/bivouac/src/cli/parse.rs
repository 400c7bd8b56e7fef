//! Values of the command line: durations, `K=V`, `NAME:PATH`, signals. Pure; used by `args` as
//! clap value parsers, so a bad value is a usage error (exit 2) that names the flag.

use std::time::Duration;

use bivouac_types::drive::{
    DriveMode, Mount, Mounts, check_drive_name, check_drive_size, check_mounts,
};
use bivouac_types::name::{Namespace, check_sandbox_name, check_scope};

use super::args::PolicyArg;

/// Bytes of a disk: `10G`, `500M`, `2T`, by 1024. At least 16 MiB: less does not start a sandbox.
pub(crate) fn disk_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is no size of a disk: write 500M, 32G or 2T, 16M at least");
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let count: u64 = text[..split].parse().map_err(|_| wrong())?;
    let shift = match text[split..].trim_end_matches('B').trim_end_matches('i') {
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(wrong()),
    };
    let bytes = count.checked_mul(1 << shift).filter(|bytes| *bytes <= 1 << 60);
    bytes.filter(|bytes| *bytes >= 16 << 20).ok_or_else(wrong)
}

/// Reads how much of a terminal's earlier output is wanted: `64K`, `1M`, `0`.
pub(crate) fn scrollback(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is no size: write 64K, 1M or a number of bytes");
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let count: u64 = text[..split].parse().map_err(|_| wrong())?;
    let shift = match &text[split..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        _ => return Err(wrong()),
    };
    count.checked_mul(1 << shift).filter(|bytes| *bytes <= 1 << 40).ok_or_else(wrong)
}

/// Reads the name of a terminal.
pub(crate) fn terminal_name(text: &str) -> Result<String, String> {
    let checked = bivouac_types::terminal::check_terminal_name(text);
    checked.map(|()| text.to_owned()).map_err(|error| error.reason)
}

/// Reads `90s`, `5m`, `1h30m`, `2d`, `500ms`; a bare number is seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is no duration: write 90s, 5m, 1h30m or 2d");
    if let Ok(seconds) = text.parse::<u64>() {
        return nonzero(Duration::from_secs(seconds));
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let count: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        let unit = &rest[digits..];
        let letters = unit.find(|c: char| c.is_ascii_digit()).unwrap_or(unit.len());
        let millis = match &unit[..letters] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(wrong()),
        };
        let part = count.checked_mul(millis).map(Duration::from_millis).ok_or_else(wrong)?;
        total = total.checked_add(part).ok_or_else(wrong)?;
        rest = &unit[letters..];
    }
    nonzero(total)
}

fn nonzero(duration: Duration) -> Result<Duration, String> {
    if duration.is_zero() { Err("must be more than zero".to_owned()) } else { Ok(duration) }
}

/// Milliseconds as the API takes them.
pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// A name of a secret.
pub(crate) fn secret_name(text: &str) -> Result<String, String> {
    bivouac_types::secret::check_name(text)
        .map(|()| text.to_owned())
        .map_err(|_| "a secret's name has 1 to 128 letters, digits, '_' and '-'".to_owned())
}

/// A variable for a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EnvVar {
    /// Its name.
    pub(crate) name: String,
    /// Its value; absent is taken from the caller's environment.
    pub(crate) value: Option<String>,
}

/// Reads `K=V`, or `K` for the caller's own value.
pub(crate) fn env_var(text: &str) -> Result<EnvVar, String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (text, None),
    };
    if name.is_empty() {
        // The rest may be a secret: not repeated.
        return Err("a variable needs a name: write NAME=VALUE or NAME".to_owned());
    }
    Ok(EnvVar { name: name.to_owned(), value })
}

/// Reads `KEY=VALUE` of a label.
pub(crate) fn tag(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("'{text}' is no label: write KEY=VALUE")),
    }
}

/// Reads `TEAM/PROJECT`.
pub(crate) fn namespace(text: &str) -> Result<Namespace, String> {
    let (team, project) = text
        .split_once('/')
        .ok_or_else(|| format!("'{text}' is no namespace: write TEAM/PROJECT"))?;
    check_scope("team", team).map_err(|error| error.to_string())?;
    check_scope("project", project).map_err(|error| error.to_string())?;
    Ok(Namespace { team: team.to_owned(), project: project.to_owned() })
}

/// Reads a policy: a mode's name, JSON, `-`, or a file.
pub(crate) fn policy(text: &str) -> Result<PolicyArg, String> {
    match text {
        "allow-all" => return Ok(PolicyArg::Mode("allow-all")),
        "deny-all" => return Ok(PolicyArg::Mode("deny-all")),
        "-" => return Ok(PolicyArg::Stdin),
        _ => {}
    }
    if text.trim_start().starts_with('{') {
        // The text may hold a secret: not repeated.
        return serde_json::from_str(text)
            .map(PolicyArg::Inline)
            .map_err(|error| format!("this is no JSON: line {}", error.line()));
    }
    let file = std::path::PathBuf::from(text);
    // A path that is none yet is told when it is read; a word that is none is a slip.
    if text.contains('/') || text.ends_with(".json") || file.exists() {
        return Ok(PolicyArg::File(file));
    }
    Err("no policy: write allow-all, deny-all, a file, JSON, or -".to_owned())
}

/// Reads a host or a range.
pub(crate) fn target(text: &str) -> Result<String, String> {
    bivouac_engine::Target::parse(text).map(|_| text.to_owned())
}

/// Reads a drive's name.
pub(crate) fn drive_name(text: &str) -> Result<String, String> {
    check_drive_name("name", text).map(|()| text.to_owned()).map_err(|error| error.reason)
}

/// A path in a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InDrive {
    /// The drive.
    pub(crate) drive: String,
    /// Below its root. Empty is that.
    pub(crate) path: String,
}

/// Reads `DRIVE:PATH`.
pub(crate) fn in_drive(text: &str) -> Result<InDrive, String> {
    let (drive, path) = text.split_once(':').unwrap_or((text, ""));
    let drive = drive_name(drive)
        .map_err(|reason| format!("'{drive}' before the ':' is no drive's name: {reason}"))?;
    Ok(InDrive { drive, path: path.to_owned() })
}

/// One end of a copy into or out of a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FilePlace {
    /// Standard input or output.
    Stdio,
    /// A path of this machine.
    Local(String),
    /// A path in a drive.
    Drive(InDrive),
}

/// Reads one end of such a copy, as [`place`] does for sandboxes.
pub(crate) fn file_place(text: &str) -> Result<FilePlace, String> {
    match text.split_once(':') {
        _ if text == "-" => Ok(FilePlace::Stdio),
        _ if text.is_empty() => Err("a path may not be empty".to_owned()),
        Some((name, _)) if !name.contains('/') => in_drive(text).map(FilePlace::Drive),
        _ => Ok(FilePlace::Local(text.to_owned())),
    }
}

/// A drive and its place in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountArg {
    /// The drive.
    pub(crate) drive: String,
    /// Absolute path inside.
    pub(crate) path: String,
    /// How.
    pub(crate) mode: DriveMode,
}

/// Reads `DRIVE:/PATH` or `DRIVE:/PATH:snapshot`.
pub(crate) fn mount(text: &str) -> Result<MountArg, String> {
    let wrong = || format!("'{text}' is no mount: write DRIVE:/PATH or DRIVE:/PATH:snapshot");
    let (drive, rest) = text.split_once(':').ok_or_else(wrong)?;
    let (path, mode) = match rest.rsplit_once(':') {
        Some((path, mode @ ("snapshot" | "read-write" | "read-only"))) => (path, mode),
        _ => (rest, "read-write"),
    };
    let mode = DriveMode::parse(mode).map_err(|error| error.reason)?;
    let mount = Mount { drive: drive_name(drive)?, mode };
    let one = Mounts::from([(path.to_owned(), mount)]);
    check_mounts(&one).map_err(|error| error.reason)?;
    Ok(MountArg { drive: drive.to_owned(), path: path.to_owned(), mode })
}

/// Reads a size: `500M`, `20G`, `1T` (powers of 1024), or bytes.
pub(crate) fn size(text: &str) -> Result<i64, String> {
    let wrong = || format!("'{text}' is no size: write 500M, 20G or 1T");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let count: i64 = text[..digits].parse().map_err(|_| wrong())?;
    let shift = match text[digits..].trim_end_matches(['B', 'b']).trim_end_matches('i') {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return Err(wrong()),
    };
    let bytes = count.checked_mul(1 << shift).ok_or_else(wrong)?;
    check_drive_size(bytes).map_err(|error| error.reason)
}

/// Reads a sandbox's name.
pub(crate) fn sandbox_name(text: &str) -> Result<String, String> {
    check_sandbox_name(text).map(|()| text.to_owned()).map_err(|error| error.reason)
}

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Standard input or output.
    Stdio,
    /// A path of this machine.
    Local(String),
    /// A path in a sandbox.
    Sandbox {
        /// The sandbox.
        name: String,
        /// Absolute, or relative to its working folder. Empty is that folder.
        path: String,
    },
}

/// Reads one end of a copy: `-`, a path, or `NAME:PATH`. A path with a colon is written with a
/// slash before the colon (`./a:b`), as for `scp`.
pub(crate) fn place(text: &str) -> Result<Place, String> {
    if text == "-" {
        return Ok(Place::Stdio);
    }
    if text.is_empty() {
        return Err("a path may not be empty".to_owned());
    }
    match text.split_once(':') {
        Some((name, path)) if !name.contains('/') => {
            let name = sandbox_name(name).map_err(|reason| {
                format!("'{name}' before the ':' is no sandbox name: {reason}")
            })?;
            Ok(Place::Sandbox { name, path: path.to_owned() })
        }
        _ => Ok(Place::Local(text.to_owned())),
    }
}

const SIGNALS: [(&str, i32); 31] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("PWR", 30),
    ("SYS", 31),
];

/// Reads a signal: `TERM`, `SIGTERM`, `term` or `15`.
pub(crate) fn signal(text: &str) -> Result<i32, String> {
    let wrong =
        || format!("'{text}' is no signal: write a name like TERM or a number from 1 to 64");
    if let Ok(number) = text.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number).ok_or_else(wrong);
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    SIGNALS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number).ok_or_else(wrong)
}

/// The name of a signal, for messages.
pub(crate) fn signal_name(number: i32) -> String {
    SIGNALS
        .iter()
        .find(|(_, known)| *known == number)
        .map_or_else(|| format!("signal {number}"), |(name, _)| format!("SIG{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_disks() {
        assert_eq!(disk_size("16M"), Ok(16 << 20));
        assert_eq!(disk_size("10G"), Ok(10 << 30));
        assert_eq!(disk_size("2TiB"), Ok(2 << 40));
        for bad in
            ["", "5", "15M", "0G", "1K", "G", "-1G", "1.5G", "99999999999999999999T", "9999999T"]
        {
            assert!(disk_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations() {
        let ms = |text: &str| duration(text).map(|d| d.as_millis());
        assert_eq!(ms("90s"), Ok(90_000));
        assert_eq!(ms("5m"), Ok(300_000));
        assert_eq!(ms("1h30m"), Ok(5_400_000));
        assert_eq!(ms("2d"), Ok(172_800_000));
        assert_eq!(ms("1500ms"), Ok(1_500));
        assert_eq!(ms("10"), Ok(10_000));
        for bad in [
            "",
            "0",
            "0s",
            "s",
            "5x",
            "5 m",
            "-5m",
            "1.5h",
            "m5",
            "5m3",
            "é",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn variables() {
        assert_eq!(env_var("A=b=c").map(|v| v.value), Ok(Some("b=c".to_owned())));
        assert_eq!(env_var("A=").map(|v| v.value), Ok(Some(String::new())));
        assert_eq!(env_var("A").map(|v| v.value), Ok(None));
        let error = env_var("=hunter2").unwrap_err();
        assert!(!error.contains("hunter2"), "{error}");
        assert!(env_var("").is_err());
    }

    #[test]
    fn labels_and_namespaces() {
        assert_eq!(tag("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(tag("a").is_err() && tag("=b").is_err());
        assert!(namespace("local/local").is_ok());
        for bad in ["local", "/x", "x/", "a/b/c", "a b/c"] {
            assert!(namespace(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn policies_are_words_json_or_files() {
        assert_eq!(policy("deny-all"), Ok(PolicyArg::Mode("deny-all")));
        assert_eq!(policy("-"), Ok(PolicyArg::Stdin));
        assert!(matches!(policy(r#" {"allow":[]}"#), Ok(PolicyArg::Inline(_))));
        assert_eq!(policy("Cargo.toml"), Ok(PolicyArg::File("Cargo.toml".into())));
        assert!(policy("some").is_err());
        assert!(!policy(r#"{"hunter2""#).unwrap_err().contains("hunter2"));
        assert!(target("a.test:443").is_ok() && target("a b").is_err());
    }

    #[test]
    fn places() {
        let inside = |name: &str, path: &str| {
            Ok(Place::Sandbox { name: name.to_owned(), path: path.to_owned() })
        };
        assert_eq!(place("-"), Ok(Place::Stdio));
        assert_eq!(place("box:/etc/x"), inside("box", "/etc/x"));
        assert_eq!(place("box:a:b"), inside("box", "a:b"));
        assert_eq!(place("box:"), inside("box", ""));
        assert_eq!(place("./a:b"), Ok(Place::Local("./a:b".to_owned())));
        assert_eq!(place("/tmp/a:b"), Ok(Place::Local("/tmp/a:b".to_owned())));
        assert_eq!(place("plain"), Ok(Place::Local("plain".to_owned())));
        for bad in ["", ":x", "a b:x", "sessions:x"] {
            assert!(place(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn drives_and_their_places() {
        let read = |text: &str| mount(text).map(|m| (m.drive, m.path, m.mode));
        let (write, view) = (DriveMode::ReadWrite, DriveMode::Snapshot);
        assert_eq!(read("d:/data"), Ok(("d".to_owned(), "/data".to_owned(), write)));
        assert_eq!(read("d:/data:snapshot"), Ok(("d".to_owned(), "/data".to_owned(), view)));
        assert_eq!(read("d:/a:b"), Ok(("d".to_owned(), "/a:b".to_owned(), write)));
        for bad in ["", "d", "d:", "d:data", ":/data", "d/x:/data", "d:/", "d:/proc", "d:/a/../b"] {
            assert!(mount(bad).is_err(), "{bad}");
        }
        assert_eq!(size("1T"), Ok(1 << 40));
        assert_eq!(size("20GiB"), Ok(20 << 30));
        assert_eq!(size("1048576"), Ok(1 << 20));
        for bad in ["", "G", "1X", "-1G", "1.5G", "1", "99T", "99999999999999T"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        let inside = in_drive("d:a/b").unwrap();
        assert_eq!((inside.drive.as_str(), inside.path.as_str()), ("d", "a/b"));
        assert_eq!(file_place("./a:b"), Ok(FilePlace::Local("./a:b".to_owned())));
        assert!(matches!(file_place("d:"), Ok(FilePlace::Drive(_))));
        assert!(file_place("").is_err() && file_place("a b:x").is_err());
    }

    #[test]
    fn signals() {
        for text in ["TERM", "SIGTERM", "term", "15"] {
            assert_eq!(signal(text), Ok(15), "{text}");
        }
        for bad in ["", "0", "65", "-9", "SIG", "NOPE"] {
            assert!(signal(bad).is_err(), "{bad}");
        }
        assert_eq!(signal_name(9), "SIGKILL");
        assert_eq!(signal_name(40), "signal 40");
    }
}
