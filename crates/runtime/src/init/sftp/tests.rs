//! The server on a scratch folder, without a sandbox around it.

use super::*;

/// Packets of a client, put together.
#[derive(Default)]
struct Client(Vec<u8>);

impl Client {
    fn ask(&mut self, kind: u8, id: u32, parts: &[&[u8]]) {
        let length = 5 + parts.iter().map(|part| part.len()).sum::<usize>();
        self.0.extend((length as u32).to_be_bytes());
        self.0.push(kind);
        self.0.extend(id.to_be_bytes());
        parts.iter().for_each(|part| self.0.extend(*part));
    }

    /// Kind, number and rest of each answer.
    fn run(self, server: &mut Server<'_>) -> Vec<(u8, u32, Vec<u8>)> {
        let mut out = Vec::new();
        let _ = server.work(&self.0[..], &mut out);
        let mut rest = &out[..];
        let mut answers = Vec::new();
        while !rest.is_empty() {
            let (head, after) = rest.split_at(4);
            let length = u32::from_be_bytes(head.try_into().unwrap()) as usize;
            let (packet, after) = after.split_at(length);
            let id = u32::from_be_bytes(packet[1..5].try_into().unwrap());
            answers.push((packet[0], id, packet[5..].to_vec()));
            rest = after;
        }
        answers
    }
}

fn server() -> Server<'static> {
    Server { home: b"/root", handles: HashMap::new(), next: 0 }
}

fn text(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

fn path(folder: &tempfile::TempDir, name: &str) -> Vec<u8> {
    text(folder.path().join(name).as_os_str().as_bytes())
}

const NONE: [u8; 4] = [0; 4];

#[test]
fn a_file_is_written_read_and_renamed() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (path(&folder, "a"), path(&folder, "b"));
    let flags = (wire::READ | wire::WRITE | wire::CREAT | wire::EXCL).to_be_bytes();
    let mode = [&4u32.to_be_bytes()[..], &0o100_640u32.to_be_bytes()].concat();
    let handle = text(&0u32.to_be_bytes());
    let offset = 3u64.to_be_bytes();
    let mut client = Client::default();
    client.ask(1, 3, &[]);
    client.ask(3, 1, &[&a, &flags, &mode]);
    client.ask(6, 2, &[&handle, &offset, &text(b"hello")]);
    client.ask(5, 3, &[&handle, &offset, &100u32.to_be_bytes()]);
    client.ask(5, 4, &[&handle, &100u64.to_be_bytes(), &100u32.to_be_bytes()]);
    client.ask(4, 5, &[&handle]);
    client.ask(4, 6, &[&handle]);
    client.ask(18, 7, &[&a, &b]);
    client.ask(3, 8, &[&b, &flags, &mode]);
    client.ask(200, 9, &[&text(b"limits@openssh.com")]);
    client.ask(200, 10, &[&text(b"nobody@example.org")]);
    let answers = client.run(&mut server());
    let code = |n: usize| u32::from_be_bytes(answers[n].2[..4].try_into().unwrap());
    let kinds: Vec<_> = answers.iter().map(|answer| answer.0).collect();
    assert_eq!(kinds, [2, 102, 101, 103, 101, 101, 101, 101, 101, 201, 101]);
    assert_eq!(answers[3].2, text(b"hello"));
    let codes: Vec<_> = [2, 4, 5, 6, 7, 8, 10].map(code).to_vec();
    assert_eq!(codes, [0, Code::Eof as u32, 0, 4, 0, 4, Code::Unsupported as u32]);
    assert_eq!(std::fs::read(folder.path().join("b")).unwrap(), b"\0\0\0hello");
    let made = std::fs::metadata(folder.path().join("b")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&made.permissions()) & 0o7777, 0o640);
    assert!(!folder.path().join("a").exists());
}

#[test]
fn a_rename_replaces_only_when_that_is_meant() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        std::fs::write(folder.path().join(name), name).unwrap();
    }
    let (a, b) = (path(&folder, "a"), path(&folder, "b"));
    let mut client = Client::default();
    client.ask(18, 1, &[&a, &b]);
    client.ask(200, 2, &[&text(b"posix-rename@openssh.com"), &a, &b]);
    let answers = client.run(&mut server());
    assert_ne!(answers[0].2[..4], NONE);
    assert_eq!(answers[1].2[..4], NONE);
    assert_eq!(std::fs::read(folder.path().join("b")).unwrap(), b"a");
}

#[test]
fn names_that_are_no_text_are_listed_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(OsStr::from_bytes(b"\xff\xfe")), "").unwrap();
    let mut client = Client::default();
    client.ask(11, 1, &[&path(&folder, "")]);
    client.ask(12, 2, &[&text(&0u32.to_be_bytes())]);
    client.ask(12, 3, &[&text(&0u32.to_be_bytes())]);
    let answers = client.run(&mut server());
    assert_eq!(answers[1].0, 104);
    assert!(answers[1].2.windows(2).any(|pair| pair == b"\xff\xfe"));
    assert_eq!(answers[2].2[..4], (Code::Eof as u32).to_be_bytes());
}

#[test]
fn a_path_to_be_made_is_real_already() {
    let folder = tempfile::tempdir().unwrap();
    let mut client = Client::default();
    client.ask(16, 1, &[&path(&folder, "x/../new")]);
    client.ask(16, 2, &[&path(&folder, "none/new")]);
    client.ask(16, 3, &[&path(&folder, "./new")]);
    let answers = client.run(&mut server());
    assert_eq!((answers[0].0, answers[1].0), (101, 101), "x is not there");
    let real = std::fs::canonicalize(folder.path()).unwrap().join("new");
    let real = real.as_os_str().as_bytes().to_vec();
    assert_eq!(answers[2].2[4..][..real.len() + 4], text(&real));
}

#[test]
fn handles_have_a_bound() {
    let folder = tempfile::tempdir().unwrap();
    let mut client = Client::default();
    for id in 0..=MAX_HANDLES as u32 {
        client.ask(11, id, &[&path(&folder, "")]);
    }
    let answers = client.run(&mut server());
    assert!(answers[..MAX_HANDLES].iter().all(|answer| answer.0 == 102));
    assert_eq!(answers[MAX_HANDLES].0, 101);
}

#[test]
fn a_packet_that_is_too_long_ends_it() {
    for length in [0, wire::MAX_PACKET as u32 + 1, u32::MAX] {
        let mut client = Client::default();
        client.0.extend(length.to_be_bytes());
        client.0.extend([0; 64]);
        assert_eq!(client.run(&mut server()), []);
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(300))]

    /// Whatever a client sends in whatever order, each request has one answer, with its number.
    #[test]
    fn a_hostile_client_gets_one_answer_to_each(
        asked in proptest::collection::vec(
            (3u8..=22, 0usize..4, 0u32..4, proptest::num::u32::ANY, proptest::collection::vec(proptest::num::u8::ANY, 0..24)),
            1..40,
        )
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut client = Client::default();
        for (at, (kind, name, handle, number, junk)) in asked.iter().enumerate() {
            // Paths stay in the folder: what they reach is the sandbox's in earnest.
            let name = path(&folder, ["a", "b", "a/c", ""][*name]);
            let other = path(&folder, "b");
            let handle = text(&handle.to_be_bytes());
            let number = number.to_be_bytes();
            let parts: [&[u8]; 3] = match kind {
                3 => [&name, &number, junk],
                4 | 8 | 10 | 12 => [&handle, junk, &[]],
                5 | 6 => [&handle, &[0; 5], junk],
                9 | 14 => [&name, junk, &[]],
                18 => [&name, &other, junk],
                20 => [&text(junk), &name, &[]],
                21 => [&text(b"hardlink@openssh.com"), &name, &other],
                22 => [&text(b"lsetstat@openssh.com"), &name, junk],
                _ => [&name, junk, &[]],
            };
            let kind = if *kind > 20 { 200 } else { *kind };
            client.ask(kind, at as u32, &parts);
        }
        let answers = client.run(&mut server());
        let numbers: Vec<_> = answers.iter().map(|answer| answer.1).collect();
        proptest::prop_assert_eq!(numbers, (0..asked.len() as u32).collect::<Vec<_>>());
    }
}
