//! What the scanner lets through: the same however the bytes are cut, and only within limits.

use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::intercept::budget::Budget;

/// What the parser gets of these bytes, cut into pieces of this length, and what was wrong with them.
fn scanned(bytes: &[u8], piece: usize) -> (Vec<u8>, Option<Fault>, bool) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let (mut guest, broker) = tokio::io::duplex(piece);
        let watch = Rc::new(Watch::default());
        let mut scan = Scan::new(broker, Rc::clone(&watch), &Budget::default());
        let mut got = Vec::new();
        let send = async {
            let _ = guest.write_all(bytes).await;
            drop(guest);
        };
        let read = async {
            let mut buffer = [0; 7];
            loop {
                match scan.read(&mut buffer).await {
                    Ok(0) => return false,
                    Ok(n) => got.extend_from_slice(&buffer[..n]),
                    Err(_) => return true,
                }
                // Each request is answered at once.
                while watch.busy.get() > 0 {
                    drop(Busy::counted(&watch));
                }
            }
        };
        // Whoever has seen enough does not wait for the rest to be sent.
        let broke = tokio::select! {
            broke = read => broke,
            () = async { send.await; std::future::pending().await } => false,
        };
        (got, watch.fault(), broke)
    })
}

const GOOD: [&str; 6] = [
    "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\nGET / HTTP/1",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA;x=y\r\n0123456789\r\n0\r\nT: x\r\n\r\n",
    "GET / HTTP/1.0\r\nhost:a\r\nX: \t y\r\n\r\n",
    "PUT /%20 HTTP/1.1\r\nHOST: a\r\ncontent-length: 0\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
];

#[test]
fn good_bytes_pass_unchanged_however_they_are_cut() {
    // The second message's body is cut to its length.
    let whole = GOOD
        .concat()
        .replace("GET / HTTP/1GET", "GET / HTTP/GET")
        .replace("HTTP/1POST", "HTTP/POST");
    let whole = whole.into_bytes();
    for piece in [1, 2, 3, 64, 4096] {
        let (got, fault, broke) = scanned(&whole, piece);
        assert_eq!((fault, broke), (None, false), "{piece}");
        assert!(got == whole, "{piece}: {}", String::from_utf8_lossy(&got));
    }
}

#[test]
fn a_head_that_is_not_whole_never_reaches_the_parser() {
    for bytes in ["GET / HTTP/1.1\r\nHost: a\r\n", "GET", "GET / HTTP/1.1\r\nHost: a\r\n\r"] {
        let (got, fault, _) = scanned(bytes.as_bytes(), 3);
        assert_eq!((got.len(), fault), (0, None), "{bytes:?}");
    }
}

#[test]
fn case_48_a_head_that_does_not_come_is_timed_out() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let (mut guest, broker) = tokio::io::duplex(64);
        let watch = Rc::new(Watch::default());
        let mut scan = Scan::new(broker, Rc::clone(&watch), &Budget::default());
        let began = Instant::now();
        let drip = async {
            // A byte each second, without end.
            loop {
                if guest.write_all(b"G").await.is_err() {
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let mut buffer = [0; 64];
        let read = tokio::select! {
            read = scan.read(&mut buffer) => read,
            () = drip => Ok(1),
        };
        assert_eq!(read.expect("an end"), 0);
        assert_eq!(watch.fault().map(|f| f.status), Some(408));
        assert!(began.elapsed() >= HEAD_TIME && began.elapsed() < HEAD_TIME * 2);
    });
}

#[test]
fn a_connection_that_rests_is_closed_without_a_word_and_keeps_no_buffer() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let (mut guest, broker) = tokio::io::duplex(64);
        let watch = Rc::new(Watch::default());
        let mut scan = Scan::new(broker, Rc::clone(&watch), &Budget::default());
        guest.write_all(GOOD[0].as_bytes()).await.expect("sent");
        let mut buffer = [0; 256];
        assert_eq!(scan.read(&mut buffer).await.expect("a request"), GOOD[0].len());
        assert_eq!(scan.raw.capacity(), 0);
        // While the request is answered nothing is timed.
        let wait = tokio::time::timeout(IDLE_TIME * 4, scan.read(&mut buffer)).await;
        assert!(wait.is_err());
        drop(Busy::counted(&watch));
        assert_eq!(scan.read(&mut buffer).await.expect("an end"), 0);
        assert_eq!(watch.fault(), None);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any bytes: the verdict and what passes do not depend on how they are cut, and what passes is a
    /// beginning of what was sent.
    #[test]
    fn cuts_do_not_matter(parts in prop::collection::vec(prop_oneof![
        prop::sample::select(GOOD.to_vec()).prop_map(str::to_owned),
        prop::sample::select(vec!["\r\n", "\n", "\r", "0\r\n", "Host: b\r\n", "Content-Length: 3\r\n", "Transfer-Encoding: chunked\r\n", "GET / HTTP/1.1\r\n", "Upgrade: x\r\n", "abc", ";", ":"]).prop_map(str::to_owned),
        "[ -~]{0,6}",
    ], 0..12), piece in 1usize..40) {
        let bytes = parts.concat().into_bytes();
        let (whole, fault, broke) = scanned(&bytes, 65_536);
        let (cut, cut_fault, cut_broke) = scanned(&bytes, piece);
        prop_assert!(bytes.starts_with(&whole));
        prop_assert_eq!(fault, cut_fault);
        prop_assert_eq!(broke, cut_broke);
        prop_assert_eq!(whole, cut);
    }

    /// Nothing panics, whatever comes.
    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let (got, _, _) = scanned(&bytes, 17);
        prop_assert!(bytes.starts_with(&got));
    }
}
