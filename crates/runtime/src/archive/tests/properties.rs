//! Properties: archives that are made up, and bytes of any kind.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use tar::{EntryType, Header};

use super::*;

/// A step of a made-up archive.
#[derive(Debug, Clone)]
enum Step {
    File(String, Vec<u8>),
    Folder(String),
    Link(String, String),
    Hard(String, String),
    Fifo(String),
}

fn step() -> impl Strategy<Value = Step> {
    let name = "(\\./|/)?[abl](/[abl.]{1,2}){0,3}/?";
    let target = "(\\.\\./|/)?[abl](/[abl]){0,2}";
    prop_oneof![
        3 => (name, proptest::collection::vec(any::<u8>(), 0..700)).prop_map(|(n, c)| Step::File(n, c)),
        2 => name.prop_map(Step::Folder),
        3 => (name, target).prop_map(|(n, t)| Step::Link(n, t)),
        2 => (name, target).prop_map(|(n, t)| Step::Hard(n, t)),
        1 => name.prop_map(Step::Fifo),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Whatever an archive says, nothing outside of the root changes (the bed checks), and an archive that
    /// is taken is what its last entries say.
    #[test]
    fn nothing_leads_out(steps in proptest::collection::vec(step(), 0..25), overlay: bool) {
        let bed = Bed::new();
        let mut made = tar();
        let mut last: BTreeMap<String, Option<Vec<u8>>> = BTreeMap::new();
        for step in &steps {
            let plain = |name: &str| {
                name.split('/').filter(|p| !matches!(*p, "" | ".")).collect::<Vec<_>>().join("/")
            };
            let (name, content) = match step {
                Step::File(name, content) if !name.ends_with('/') => (name, Some(content.clone())),
                Step::File(name, _) | Step::Folder(name) | Step::Link(name, _) => (name, None),
                Step::Hard(name, _) | Step::Fifo(name) => (name, None),
            };
            let name = plain(name);
            last.retain(|known, _| !known.starts_with(&format!("{name}/")) || content.is_none());
            last.insert(name, content);
            made = match step {
                Step::File(name, content) => made.file(name, content),
                Step::Folder(name) => made.folder(name),
                Step::Link(name, target) => made.link(name, target),
                Step::Hard(name, target) => made.hard(name, target),
                Step::Fifo(name) => made.kind(name, EntryType::Fifo, ""),
            };
        }
        let mode = if overlay { Whiteouts::Overlay } else { Whiteouts::Apply };
        if bed.unpack_with(&[made.end()], LIMITS, mode).is_ok() {
            for (name, content) in last {
                // A later link or file above it has taken it away, or made it another's.
                let above = Path::new(&name).ancestors().skip(1).filter(|p| !p.as_os_str().is_empty());
                let folders = above.map(|p| std::fs::symlink_metadata(bed.root().join(p)));
                let mut folders = folders;
                if !folders.all(|m| m.is_ok_and(|m| m.is_dir())) {
                    continue;
                }
                if let Some(content) = content
                    && let Ok(found) = std::fs::symlink_metadata(bed.at(&name))
                {
                    prop_assert!(found.is_file());
                    prop_assert_eq!(std::fs::read(bed.at(&name)).unwrap(), content);
                }
            }
        }
    }

    /// What the `tar` crate writes is read as it was meant.
    #[test]
    fn what_tar_writes_is_read(
        files in proptest::collection::btree_map("[a-zé]{1,40}(/[a-z]{1,90}){0,4}", proptest::collection::vec(any::<u8>(), 0..2000), 1..8)
    ) {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in &files {
            let mut header = Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o640);
            builder.append_data(&mut header, name, content.as_slice()).unwrap();
        }
        let bytes = builder.into_inner().unwrap();
        let mut reader = read::Reader::new(bytes.as_slice(), LIMITS);
        let mut seen = BTreeMap::new();
        while let Some(entry) = reader.next().unwrap() {
            let mut content = Vec::new();
            let mut buffer = [0u8; 100];
            loop {
                match reader.body(&mut buffer).unwrap() {
                    0 => break,
                    count => content.extend_from_slice(&buffer[..count]),
                }
            }
            let name = String::from_utf8(entry.name.bytes().to_vec()).unwrap();
            seen.insert(name, content);
        }
        prop_assert_eq!(seen, files);
    }

    /// The fuzz target holds on bytes of any kind, and on archives with a few bytes changed.
    #[test]
    fn any_bytes_are_read(
        noise in proptest::collection::vec(any::<u8>(), 0..2000),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
    ) {
        fuzz(&noise);
        let mut whole = tar()
            .pax(&[("path", b"a/b"), ("SCHILY.xattr.user.x", b"1"), ("size", b"3")])
            .file("x", b"abc")
            .long(b'L', b"long/name")
            .file("y", b"d")
            .hard("z", "y")
            .link("l", "../..")
            .end();
        for (at, byte) in changes {
            let at = at.index(whole.len());
            whole[at] = byte;
        }
        fuzz(&whole);
    }
}
