//! Decompression with a bound: a small archive that becomes a huge one is refused while it does.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that may come out of however few.
const FREE: u64 = 64 << 20;
/// Bytes that may come out for each that goes in, beyond that. Gzip reaches 1,030 on zeros alone.
const RATIO: u64 = 1_100;
/// Largest window of zstd, as a power of two: memory that a stream can ask for.
const WINDOW: u32 = 27;

/// What a stream is compressed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Plain,
    Gzip,
    Zstd,
}

/// A reader of what is compressed in `input` by gzip or zstd, or not at all. The first bytes decide; a media
/// type, if one is told, has to agree with them.
///
/// # Errors
/// As the input; `InvalidData` when the media type says something else, or is of an unknown compression.
/// The reader answers `InvalidData` when more comes out than a decent archive holds.
pub fn decompressor<'a>(
    input: impl Read + Send + 'a,
    media_type: Option<&str>,
) -> io::Result<Box<dyn Read + Send + 'a>> {
    let taken = Arc::new(AtomicU64::new(0));
    let counted = Counted { input, taken: Arc::clone(&taken) };
    let mut input = BufReader::with_capacity(128 << 10, counted);
    let mut magic = [0u8; 4];
    let mut have = 0;
    // A buffer of a pipe can hold a single byte.
    let first = loop {
        let seen = input.fill_buf()?;
        if seen.is_empty() {
            break magic[..have].to_vec();
        }
        let take = seen.len().min(magic.len() - have);
        magic[have..have + take].copy_from_slice(&seen[..take]);
        have += take;
        input.consume(take);
        if have == magic.len() {
            break magic.to_vec();
        }
    };
    let method = match first.as_slice() {
        [0x1f, 0x8b, ..] => Method::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => Method::Zstd,
        _ => Method::Plain,
    };
    if let Some(told) = media_type {
        let wanted = told_by(told)?;
        if wanted != method {
            let text = format!("it is said to be '{told}' and is not");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
    }
    let whole = io::Cursor::new(first).chain(input);
    let bound = |output: Box<dyn Read + Send + 'a>| Bounded { output, taken, given: 0 };
    Ok(match method {
        Method::Plain => Box::new(whole),
        Method::Gzip => Box::new(bound(Box::new(flate2::read::MultiGzDecoder::new(whole)))),
        Method::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(BufReader::new(whole))?;
            decoder.window_log_max(WINDOW)?;
            Box::new(bound(Box::new(decoder)))
        }
    })
}

/// The compression that a media type of OCI or Docker names.
fn told_by(media_type: &str) -> io::Result<Method> {
    let kind = media_type.split(';').next().unwrap_or_default().trim();
    if kind.ends_with("+gzip") || kind.ends_with(".gzip") || kind.ends_with("/gzip") {
        return Ok(Method::Gzip);
    }
    if kind.ends_with("+zstd") || kind.ends_with(".zstd") || kind.ends_with("/zstd") {
        return Ok(Method::Zstd);
    }
    if kind.ends_with(".tar") || kind.ends_with("/x-tar") {
        return Ok(Method::Plain);
    }
    let text = format!("layers of the kind '{media_type}' are not known");
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

/// Counts what goes in.
struct Counted<R> {
    input: R,
    taken: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.taken.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Bounds what comes out.
struct Bounded<'a> {
    output: Box<dyn Read + Send + 'a>,
    taken: Arc<AtomicU64>,
    given: u64,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.output.read(buffer)?;
        self.given += count as u64;
        let taken = self.taken.load(Ordering::Relaxed);
        if self.given > taken.saturating_mul(RATIO).saturating_add(FREE) {
            let text = format!("it grows without end: {} bytes out of {taken}", self.given);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(count)
    }
}
