//! Where the last so many bytes of a terminal's output begin.
//!
//! Invariant: what is shown from there on does not begin in the middle of an escape sequence or of a character,
//! as far as that can be known: what the reader of [`Stance`] calls at rest. Output is a stranger's: whatever it
//! is, the answer lies inside the log, and a sequence without an end is taken for one that has ended. Called when
//! a client attaches.

use bivouac_runtime::{LogRecord, RuntimeError};
use futures_util::future::BoxFuture;

/// A sequence that is longer than this is none.
const LONGEST: u32 = 4096;
/// How far a line's beginning is looked for, when what came before is gone.
const LINE: usize = 4096;

/// A place in a log: the beginning of a record, and how many bytes of output behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cursor {
    /// Offset of a record in the log.
    pub at: u64,
    /// Bytes of output to leave out from there on.
    pub skip: u64,
}

/// Where in its output a terminal is: at rest, or in the middle of something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Stance {
    state: State,
    /// Bytes that the present character still wants.
    left: u8,
    /// How long the present sequence is.
    length: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Ground,
    /// Behind ESC.
    Escape,
    /// Behind ESC [.
    Control,
    /// In a text for the terminal itself, a title for example.
    Text,
    /// Behind an ESC in such a text.
    TextEscape,
}

impl Stance {
    /// Whether a reader may begin here.
    pub(super) fn rests(self) -> bool {
        self.state == State::Ground && self.left == 0
    }

    /// Takes the next byte.
    pub(super) fn push(&mut self, byte: u8) {
        if self.state == State::Ground {
            self.ground(byte);
            return;
        }
        self.length += 1;
        let next = match (self.state, byte) {
            // CAN and SUB end whatever is going on.
            (_, 0x18 | 0x1a) => State::Ground,
            (State::Text, 0x07) | (State::TextEscape, b'\\') | (State::Control, 0x40..=0x7e) => {
                State::Ground
            }
            (State::Text, 0x1b) => State::TextEscape,
            (State::Text, _) => State::Text,
            (_, 0x1b) => State::Escape,
            (State::Control, _) => State::Control,
            (_, b'[') => State::Control,
            (_, b']' | b'P' | b'X' | b'^' | b'_') => State::Text,
            (_, 0x20..=0x2f) => State::Escape,
            _ => State::Ground,
        };
        let over = self.length > LONGEST;
        self.state = if over { State::Ground } else { next };
    }

    fn ground(&mut self, byte: u8) {
        match byte {
            0x80..=0xbf if self.left > 0 => self.left -= 1,
            0x1b => *self = Self { state: State::Escape, left: 0, length: 0 },
            0xc2..=0xdf => self.left = 1,
            0xe0..=0xef => self.left = 2,
            0xf0..=0xf4 => self.left = 3,
            _ => self.left = 0,
        }
    }
}

/// Records, and the offset behind them, on their way.
pub(super) type Reading<'a> = BoxFuture<'a, Result<(Vec<LogRecord>, u64), RuntimeError>>;

/// Finds where the last `want` bytes of output begin in a log that is kept from `start` to `until`. `read` reads
/// whole records from an offset on and answers the offset behind them.
pub(super) async fn find<'a>(
    read: impl Fn(u64, u64) -> Reading<'a>,
    start: u64,
    until: u64,
    want: u64,
) -> Result<Cursor, RuntimeError> {
    // Offsets of what is read at once, and how many bytes of output lie before.
    let (mut batches, mut total, mut at) = (Vec::new(), 0u64, start);
    while at < until {
        let (records, next) = read(at, until).await?;
        if next <= at {
            break;
        }
        batches.push((at, total));
        total += records.iter().map(|record| data(record).len() as u64).sum::<u64>();
        at = next;
    }
    let target = total.saturating_sub(want);
    if target == 0 && start == 0 {
        return Ok(Cursor { at: start, skip: 0 });
    }
    if want == 0 {
        return Ok(Cursor { at, skip: 0 });
    }
    let within = batches.iter().rposition(|(_, before)| *before <= target).unwrap_or(0);
    // One batch more in front, so that a sequence that began there is seen.
    let first = within.saturating_sub(1);
    let mut cut = Cut::new(target == 0);
    for &(at, before) in batches.get(first..).unwrap_or_default() {
        let (records, _) = read(at, until).await?;
        let mut seen = before;
        for record in &records {
            let bytes = data(record);
            if let Some(place) = cut.look(bytes, target.saturating_sub(seen)) {
                return Ok(Cursor { at, skip: seen - before + place });
            }
            seen += bytes.len() as u64;
        }
    }
    Ok(Cursor { at, skip: 0 })
}

fn data(record: &LogRecord) -> &[u8] {
    match record {
        LogRecord::Data { bytes, .. } => bytes,
        LogRecord::Cut | LogRecord::End(_) => &[],
    }
}

/// Looks for the first place to begin at.
struct Cut {
    stance: Stance,
    /// What came before is gone: a line's beginning is the best guess.
    blind: bool,
}

impl Cut {
    fn new(blind: bool) -> Self {
        Self { stance: Stance::default(), blind }
    }

    /// The place in `bytes`, not before `from`, if it is in there.
    fn look(&mut self, bytes: &[u8], from: u64) -> Option<u64> {
        if std::mem::take(&mut self.blind)
            && let Some(end) = bytes.iter().take(LINE).position(|byte| *byte == b'\n')
        {
            return Some(end as u64 + 1);
        }
        for (place, byte) in bytes.iter().enumerate() {
            let loose = (0x80..=0xbf).contains(byte);
            if place as u64 >= from && self.stance.rests() && !loose {
                return Some(place as u64);
            }
            self.stance.push(*byte);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bivouac_types::command::Stream;
    use bytes::Bytes;

    /// A log of which each record is a piece; offsets are those of a header of 13 bytes.
    async fn shown(pieces: &[&[u8]], start_at: usize, per_read: usize, want: u64) -> Vec<u8> {
        let mut offsets = vec![0u64];
        for piece in pieces {
            offsets.push(offsets.last().unwrap() + 13 + piece.len() as u64);
        }
        let read = |at: u64, _until: u64| -> Reading<'_> {
            let first = offsets.iter().position(|offset| *offset == at).unwrap();
            let last = (first + per_read).min(pieces.len());
            let records = pieces[first..last].iter().map(|piece| LogRecord::Data {
                stream: Stream::Stdout,
                bytes: Bytes::copy_from_slice(piece),
            });
            let read = Ok((records.collect(), offsets[last]));
            Box::pin(async move { read })
        };
        let (start, until) = (offsets[start_at], *offsets.last().unwrap());
        let cursor = find(read, start, until, want).await.unwrap();
        let first = offsets.iter().position(|offset| *offset == cursor.at).unwrap();
        let all: Vec<u8> = pieces[first..].concat();
        all[usize::try_from(cursor.skip).unwrap()..].to_vec()
    }

    #[tokio::test]
    async fn the_last_bytes_and_no_half_sequences() {
        let log: [&[u8]; 4] = [b"one\n", b"two\x1b[31", b"mred\x1b[0m ", "日本\n".as_bytes()];
        for per_read in 1..5 {
            let of = async |want| shown(&log, 0, per_read, want).await;
            assert_eq!(of(1000).await, log.concat(), "{per_read}");
            assert_eq!(of(0).await, b"", "{per_read}");
            assert_eq!(of(1).await, b"\n", "{per_read}");
            // In the middle of the second character.
            assert_eq!(of(3).await, b"\n", "{per_read}");
            assert_eq!(of(4).await, "本\n".as_bytes(), "{per_read}");
            // Behind the ESC, and behind the cut in the sequence of the colour.
            for want in [19, 18, 16] {
                assert_eq!(of(want).await, "red\x1b[0m 日本\n".as_bytes(), "{per_read} {want}");
            }
        }
    }

    #[tokio::test]
    async fn what_is_left_of_a_log_begins_with_a_line() {
        let log: [&[u8]; 3] = [b"gone", b"half of it\nwhole\n", b"last"];
        assert_eq!(shown(&log, 1, 2, 1000).await, b"whole\nlast");
        assert_eq!(shown(&log, 2, 2, 1000).await, b"last");
    }

    proptest::proptest! {
        /// Whatever is written: what is shown is an end of it, and not longer than asked for.
        #[test]
        fn any_output(
            pieces in proptest::collection::vec(proptest::collection::vec(0u8..=255, 1..40), 1..20),
            per_read in 1usize..6,
            want in 0u64..400,
        ) {
            let slices: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let got = runtime.block_on(shown(&slices, 0, per_read, want));
            let all = pieces.concat();
            assert!(all.ends_with(&got));
            assert!(got.len() as u64 <= want);
        }
    }

    #[test]
    fn a_sequence_without_an_end_ends() {
        let mut stance = Stance::default();
        b"\x1b]0;".iter().for_each(|byte| stance.push(*byte));
        assert!(!stance.rests());
        (0..=LONGEST).for_each(|_| stance.push(b'x'));
        assert!(stance.rests());
    }
}
