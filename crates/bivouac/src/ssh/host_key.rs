//! The engine's SSH host key.
//!
//! Invariant: made once per data folder, mode 0600, and kept: clients know the engine by it. Called by `serve`.

use std::io;
use std::path::Path;

use russh::keys::ssh_key::private::Ed25519Keypair;
use russh::keys::ssh_key::{LineEnding, PrivateKey};

use crate::serve::record::write_private;

/// Its file in the data folder.
const FILE: &str = "ssh_host_ed25519_key";

/// Reads the key, or makes and keeps one at the first start.
///
/// # Errors
/// A file that is there and is no key, the file system's, no randomness.
pub(crate) fn ensure(data_dir: &Path) -> io::Result<PrivateKey> {
    let path = data_dir.join(FILE);
    match std::fs::read(&path) {
        Ok(bytes) => PrivateKey::from_openssh(&bytes).map_err(|error| {
            let text = format!("{} is not an SSH key: {error}", path.display());
            io::Error::new(io::ErrorKind::InvalidData, text)
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = new("bivouac")?;
            let text = key.to_openssh(LineEnding::LF).map_err(io::Error::other)?;
            write_private(&path, text.as_bytes())?;
            Ok(key)
        }
        Err(error) => Err(error),
    }
}

/// A new ed25519 key.
///
/// # Errors
/// No randomness.
pub(crate) fn new(comment: &str) -> io::Result<PrivateKey> {
    let mut seed = [0u8; 32];
    getrandom::fill(&mut seed).map_err(io::Error::other)?;
    let pair = Ed25519Keypair::from_seed(&seed);
    seed.fill(0);
    PrivateKey::new(pair.into(), comment).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn it_is_made_once_and_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let key = ensure(folder.path()).unwrap();
        assert_eq!(ensure(folder.path()).unwrap().public_key(), key.public_key());
        let file = folder.path().join(FILE);
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&file, "no key").unwrap();
        assert!(ensure(folder.path()).unwrap_err().to_string().contains("not an SSH key"));
        assert_ne!(new("a").unwrap().public_key(), new("a").unwrap().public_key());
    }
}
