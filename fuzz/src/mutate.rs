//! Makes new inputs out of known ones: no coverage, so the corpus has to reach each part by itself.

/// Longest input, bytes.
const LONGEST: usize = 4096;
/// Bytes at which parsers change their mind.
const EDGES: [u8; 18] = [
    0, 1, b'\t', b'\n', b'\r', b' ', b'%', b'*', b'-', b'.', b'/', b':', b';', b'@', b'[', b'\\',
    127, 255,
];

/// A source of inputs.
#[derive(Debug)]
pub struct Mutator<'a> {
    state: u64,
    corpus: &'a [Vec<u8>],
    words: &'a [&'a str],
}

impl<'a> Mutator<'a> {
    /// Equal seeds make equal inputs.
    #[must_use]
    pub fn new(seed: u64, corpus: &'a [Vec<u8>], words: &'a [&'a str]) -> Self {
        // A generator of this kind never leaves zero.
        Self { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, corpus, words }
    }

    /// The next input: a known one, changed in one to six places. Mostly in few: what is changed much is
    /// refused by the first check and tests nothing behind it.
    pub fn input(&mut self) -> Vec<u8> {
        let mut input = self.pick(self.corpus).cloned().unwrap_or_default();
        let changes = match self.below(4) {
            0 | 1 => 1,
            2 => 2,
            _ => 1 + self.below(6),
        };
        for _ in 0..changes {
            self.change(&mut input);
        }
        input.truncate(LONGEST);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        let here = input.get(at).copied();
        match (self.below(9), here) {
            (0, Some(byte)) => input[at] = byte ^ (1 << self.below(8)),
            (1, Some(_)) => input[at] = self.edge(),
            (2, Some(byte)) => {
                input[at] = byte.wrapping_add(if self.below(2) == 0 { 1 } else { 255 })
            }
            (3, Some(_)) => {
                let end = (at + 1 + self.below(8)).min(input.len());
                input.drain(at..end);
            }
            (4, Some(_)) => {
                let end = (at + 1 + self.below(32)).min(input.len());
                let piece = input[at..end].to_vec();
                let to = self.below(input.len() + 1);
                for _ in 0..=self.below(3) {
                    input.splice(to..to, piece.iter().copied());
                }
            }
            (5, _) => {
                // The end of another one.
                if let Some(other) = self.pick(self.corpus) {
                    let from = self.below(other.len() + 1);
                    input.truncate(at);
                    input.extend_from_slice(&other[from..]);
                }
            }
            (6, _) => {
                if let Some(word) = self.pick(self.words) {
                    input.splice(at..at, word.bytes());
                }
            }
            (7, Some(_)) => input.truncate(at),
            _ => {
                let byte = self.edge();
                input.insert(at, byte);
            }
        }
    }

    fn edge(&mut self) -> u8 {
        match self.below(3) {
            0 => u8::try_from(self.below(256)).unwrap_or(0),
            _ => EDGES[self.below(EDGES.len())],
        }
    }

    fn pick<T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        list.get(self.below(list.len().max(1)))
    }

    /// A number below `n`, which is not zero.
    fn below(&mut self, n: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        // The upper half of the bits is the better one.
        usize::try_from(self.state >> 32).unwrap_or(0) % n
    }
}
