//! Tar archives written byte by byte: good ones, and those that no library would write.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;

const BLOCK: usize = 512;

/// One header, every field as the test wants it.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Name, at most 100 bytes.
    pub name: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// The size that the header claims.
    pub size: u64,
    /// Type flag: `0` file, `1` hard link, `2` symlink, `3`/`4` device, `5` folder, `6` FIFO, `x` PAX.
    pub kind: u8,
    /// Target of a link.
    pub link: Vec<u8>,
}

impl Entry {
    /// A header with mode 0644, no size and no link.
    pub fn new(name: impl AsRef<[u8]>, kind: u8) -> Self {
        Self { name: name.as_ref().to_vec(), mode: 0o644, size: 0, kind, link: Vec::new() }
    }

    fn header(&self) -> [u8; BLOCK] {
        let mut block = [0u8; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.name[..self.name.len().min(100)]);
        put(100, format!("{:07o}", self.mode).as_bytes());
        put(108, b"0000000");
        put(116, b"0000000");
        if self.size < 1 << 33 {
            put(124, format!("{:011o}", self.size).as_bytes());
        } else {
            // Base 256, for sizes that eleven octal digits cannot hold.
            put(124, &[0x80, 0, 0, 0]);
            put(128, &self.size.to_be_bytes());
        }
        put(136, b"14000000000");
        put(148, b"        ");
        put(156, &[self.kind]);
        put(157, &self.link[..self.link.len().min(100)]);
        put(257, b"ustar\x0000");
        put(329, b"0000001");
        put(337, b"0000003");
        let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }
}

/// An archive in the making.
#[derive(Debug, Default, Clone)]
pub struct Tar {
    bytes: Vec<u8>,
}

impl Tar {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A regular file with mode 0644.
    #[must_use]
    pub fn file(self, name: impl AsRef<[u8]>, data: &[u8]) -> Self {
        self.file_mode(name, 0o644, data)
    }

    /// A regular file. Names over 100 bytes get a PAX header in front.
    #[must_use]
    pub fn file_mode(mut self, name: impl AsRef<[u8]>, mode: u32, data: &[u8]) -> Self {
        let name = name.as_ref();
        if name.len() > 100 {
            self = self.pax(&[("path", name)]);
        }
        let mut entry = Entry::new(name, b'0');
        entry.mode = mode;
        entry.size = data.len() as u64;
        self.raw(&entry, data)
    }

    /// A folder.
    #[must_use]
    pub fn folder(self, name: impl AsRef<[u8]>) -> Self {
        let mut entry = Entry::new(name, b'5');
        entry.mode = 0o755;
        self.raw(&entry, b"")
    }

    /// A symbolic link.
    #[must_use]
    pub fn symlink(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        let mut entry = Entry::new(name, b'2');
        entry.link = target.as_ref().to_vec();
        self.raw(&entry, b"")
    }

    /// A hard link.
    #[must_use]
    pub fn hardlink(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        let mut entry = Entry::new(name, b'1');
        entry.link = target.as_ref().to_vec();
        self.raw(&entry, b"")
    }

    /// PAX records for the next entry.
    #[must_use]
    pub fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut body = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut len = rest + 1;
            while len != rest + len.to_string().len() {
                len = rest + len.to_string().len();
            }
            body.extend(format!("{len} {key}=").as_bytes());
            body.extend(*value);
            body.push(b'\n');
        }
        let mut entry = Entry::new("pax", b'x');
        entry.size = body.len() as u64;
        self.raw(&entry, &body)
    }

    /// Any header, then any data, padded to blocks. The two need not agree.
    #[must_use]
    pub fn raw(mut self, entry: &Entry, data: &[u8]) -> Self {
        self.bytes.extend(entry.header());
        self.bytes.extend(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK), 0);
        self
    }

    /// The archive's bytes with its two closing blocks.
    #[must_use]
    pub fn bytes(mut self) -> Vec<u8> {
        self.bytes.extend([0u8; 2 * BLOCK]);
        self.bytes
    }

    /// The archive, compressed.
    ///
    /// # Panics
    /// Never: memory can be written.
    #[must_use]
    pub fn gzip(self) -> Vec<u8> {
        let mut out = GzEncoder::new(Vec::new(), Compression::fast());
        out.write_all(&self.bytes()).expect("memory can be written");
        out.finish().expect("memory can be written")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pax_lengths_count_themselves() {
        for size in [1usize, 88, 89, 90, 91, 92, 93, 94, 95, 980, 990, 991, 992, 1000] {
            let value = vec![b'a'; size];
            let bytes = Tar::new().pax(&[("path", &value)]).bytes();
            let body = &bytes[BLOCK..];
            let space = body.iter().position(|b| *b == b' ').unwrap();
            let len: usize = std::str::from_utf8(&body[..space]).unwrap().parse().unwrap();
            assert_eq!(body[len - 1], b'\n', "{size}");
            assert_eq!(len, space + 1 + "path=".len() + size + 1, "{size}");
        }
    }
}
