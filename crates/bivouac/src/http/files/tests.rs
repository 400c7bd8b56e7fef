//! Bodies and pipes: nothing is lost, nothing hangs, nothing partial passes for whole.

use std::io::Read as _;
use std::os::fd::OwnedFd;

use bivouac_runtime::{Completion, FileError, FileErrorKind};

use super::*;

fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
}

fn refusal() -> RuntimeError {
    let message = "Could not unpack the archive: it is not a gzip tar".to_owned();
    FileError { kind: FileErrorKind::Invalid, message }.into()
}

/// A sandbox that takes `take` bytes and then ends with `result`.
fn sandbox(
    take: usize,
    result: Result<(), RuntimeError>,
) -> (FileWriter, std::sync::mpsc::Receiver<Vec<u8>>) {
    let (read, write) = pipe();
    let (sender, received) = std::sync::mpsc::channel();
    let worker = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::new();
        std::fs::File::from(read).take(take as u64).read_to_end(&mut bytes).unwrap();
        // A test that looks at the error alone has dropped the other end.
        let _ = sender.send(bytes);
        result
    });
    let done = Completion::new(async move { worker.await.unwrap() });
    (FileWriter { data: write, done }, received)
}

fn body(bytes: &[u8], piece: usize) -> Body {
    let pieces: Vec<_> =
        bytes.chunks(piece).map(|p| Ok::<_, io::Error>(Bytes::copy_from_slice(p))).collect();
    Body::from_stream(stream::iter(pieces))
}

#[tokio::test]
async fn an_upload_arrives_byte_by_byte() {
    let bytes: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
    let (writer, received) = sandbox(usize::MAX, Ok(()));
    upload(body(&bytes, 70_001), writer).await.unwrap();
    assert!(received.recv().unwrap() == bytes);
}

#[tokio::test]
async fn a_refusal_reaches_a_client_that_still_sends() {
    let bytes = vec![7; 8_000_000];
    let (writer, _) = sandbox(10, Err(refusal()));
    let error = upload(body(&bytes, 100_000), writer).await.expect_err("refused");
    assert_eq!(error.code(), "bad_request");
    assert!(error.message().contains("not a gzip tar"));
}

#[tokio::test]
async fn a_refusal_does_not_wait_for_a_silent_client() {
    let (writer, _) = sandbox(4, Err(refusal()));
    let (mut sender, receiver) = tokio::io::duplex(64);
    sender.write_all(b"head").await.unwrap();
    // The client goes away when it has the answer, as clients do; here: in a moment.
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(sender);
    });
    let body = Body::from_stream(tokio_util::io::ReaderStream::new(receiver));
    let error = tokio::time::timeout(Duration::from_secs(5), upload(body, writer)).await;
    assert_eq!(error.unwrap().expect_err("refused").code(), "bad_request");
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_write() {
    let (writer, received) = sandbox(usize::MAX, Err(refusal()));
    let broken = [Ok(Bytes::from_static(b"half")), Err(io::Error::other("gone"))];
    let error = upload(Body::from_stream(stream::iter(broken)), writer).await.expect_err("gone");
    assert!(error.message().contains("ended before its end"), "{}", error.message());
    assert_eq!(received.recv().unwrap(), b"half");
}

fn reader(bytes: Vec<u8>, result: Result<(), RuntimeError>) -> FileReader {
    let (read, write) = pipe();
    let worker = tokio::task::spawn_blocking(move || {
        io::Write::write_all(&mut std::fs::File::from(write), &bytes).unwrap();
        result
    });
    let done = Completion::new(async move { worker.await.unwrap() });
    FileReader { size: 0, data: read, done }
}

#[tokio::test]
async fn a_download_is_whole() {
    for size in [0usize, 1, 65_536, 1_000_000] {
        let bytes: Vec<u8> = (0..size).map(|n| (n % 253) as u8).collect();
        let response = download(reader(bytes.clone(), Ok(()))).unwrap();
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/octet-stream");
        assert!(response.into_body().collect().await.unwrap().to_bytes() == bytes);
    }
}

#[tokio::test]
async fn a_download_that_breaks_off_breaks_the_body_off() {
    let response = download(reader(vec![1; 100], Err(refusal()))).unwrap();
    assert!(response.into_body().collect().await.is_err());
}
