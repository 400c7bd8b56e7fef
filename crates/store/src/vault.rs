//! Sealing: how secrets lie in the database.
//!
//! Owns: the key, its file and the sealed form. Invariants: a sealed text opens only with the key that
//! sealed it and only in the row that it was sealed for; a key file is never written over, and no new key
//! is made while the database holds anything that another one sealed; no key and no secret is in an error
//! or a `Debug`. Called by this crate's row modules; [`Db::unlock`] by the composition root.
//!
//! A sealed text is `v1.` and the base64 of: four bytes that name the key, the nonce (12), the cipher text
//! and its tag (AES-256-GCM). The version and the name of the key leave room for another cipher and for
//! several keys.
//!
//! A secret is sealed for its row *and* version, because a row has one after the other. A header value is not:
//! its id is a keyed hash of its text, so there is one text for an id. Variables of sandboxes are not either:
//! whoever can write the database can put a whole older row back, version and all, and only a store that he
//! cannot write would notice.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::{digest, hmac, rand};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bivouac_types::secret::Secret;
use zeroize::Zeroizing;

use crate::db::Db;
use crate::error::StoreError;

/// Bytes of a key.
const KEY: usize = 32;
const VERSION: &str = "v1.";
/// Row of the table `bivouac` that tells whether a key is the right one.
const CHECK: &str = "vault";
const CHECK_TEXT: &str = "the key of this vault";

/// A key and what it can do.
pub(crate) struct Vault {
    seal: RandomizedNonceKey,
    prints: hmac::Key,
    signs: hmac::Key,
    name: [u8; 4],
}

impl std::fmt::Debug for Vault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Vault")
    }
}

/// Which row a text is sealed for: its table and what identifies the row in it.
fn place(parts: &[&str]) -> Vec<u8> {
    let mut out = b"bivouac".to_vec();
    for part in parts {
        // With its length, so that no two lists of parts are the same text.
        out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        out.extend_from_slice(part.as_bytes());
    }
    out
}

impl Vault {
    fn new(key: &[u8; KEY]) -> Result<Self, StoreError> {
        let bad = |_| StoreError::Vault("this machine's cryptography refuses the key".to_owned());
        // Derived, so that neither the name nor a print says anything of the key.
        let derive = |what: &str| {
            let parent = hmac::Key::new(hmac::HMAC_SHA256, key);
            hmac::sign(&parent, what.as_bytes())
        };
        let mut name = [0; 4];
        name.copy_from_slice(&derive("name").as_ref()[..4]);
        Ok(Self {
            seal: RandomizedNonceKey::new(&AES_256_GCM, key).map_err(bad)?,
            prints: hmac::Key::new(hmac::HMAC_SHA256, derive("prints").as_ref()),
            signs: hmac::Key::new(hmac::HMAC_SHA256, derive("signs").as_ref()),
            name,
        })
    }

    /// Seals a text for one row.
    pub(crate) fn seal(&self, row: &[&str], text: &str) -> Result<String, StoreError> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(text.len() + 16));
        bytes.extend_from_slice(text.as_bytes());
        let nonce = self
            .seal
            .seal_in_place_append_tag(Aad::from(place(row)), &mut *bytes)
            .map_err(|_| StoreError::Vault("a secret could not be sealed".to_owned()))?;
        let mut out = Vec::with_capacity(self.name.len() + NONCE_LEN + bytes.len());
        out.extend_from_slice(&self.name);
        out.extend_from_slice(nonce.as_ref());
        out.extend_from_slice(&bytes);
        Ok(format!("{VERSION}{}", STANDARD.encode(out)))
    }

    /// Opens what was sealed for the same row.
    pub(crate) fn open(&self, row: &[&str], sealed: &str) -> Result<Secret, StoreError> {
        let fail = |why: &str| {
            let table = row.first().copied().unwrap_or("a row");
            StoreError::Vault(format!("a sealed text of {table} {why}"))
        };
        let text = sealed
            .strip_prefix(VERSION)
            .ok_or_else(|| fail("has a form that this version does not know"))?;
        let bytes = STANDARD.decode(text).map_err(|_| fail("is damaged"))?;
        if bytes.len() < self.name.len() + NONCE_LEN {
            return Err(fail("is damaged"));
        }
        let (name, rest) = bytes.split_at(self.name.len());
        if name != self.name {
            return Err(fail("was sealed with another key; name that one with --vault-key"));
        }
        let (nonce, cipher) = rest.split_at(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| fail("is damaged"))?;
        let mut cipher = Zeroizing::new(cipher.to_vec());
        let plain = self
            .seal
            .open_in_place(nonce, Aad::from(place(row)), &mut cipher)
            .map_err(|_| fail("is damaged, or was moved here from another row"))?;
        let text = std::str::from_utf8(plain).map_err(|_| fail("is no text"))?;
        Ok(Secret::new(text.to_owned()))
    }

    /// Bits for an id that is the same for the same text of the same owner and tells nothing of it.
    pub(crate) fn id(&self, owner: &str, text: &str) -> (u64, [u8; 10]) {
        let tag = hmac::sign(&self.prints, &place(&["id", owner, text]));
        let (head, tail) = tag.as_ref().split_at(8);
        let mut random = [0; 10];
        random.copy_from_slice(&tail[..10]);
        (head.iter().fold(0, |sum, byte| (sum << 8) | u64::from(*byte)), random)
    }

    /// A number that is the same for the same text and tells nothing of it.
    pub(crate) fn print(&self, text: &str) -> u64 {
        let tag = hmac::sign(&self.prints, text.as_bytes());
        tag.as_ref().iter().take(8).fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
    }
}

impl Db {
    /// Opens the vault with the key in `file`. At the very first start the key is made; after that a
    /// missing or another key is an error, whatever the reason.
    ///
    /// # Errors
    /// [`StoreError::VaultKey`], which names the file and what to do.
    pub async fn unlock(&self, file: &Path) -> Result<(), StoreError> {
        let bad =
            |reason: String| StoreError::VaultKey { file: file.display().to_string(), reason };
        let check = self.mark(CHECK).await?;
        let key = match read_key(file).map_err(&bad)? {
            Some(key) => key,
            None if check.is_some() => {
                let reason = "is missing, and without it the secrets in this database cannot be read: put \
                              it back, or name it with --vault-key";
                return Err(bad(reason.to_owned()));
            }
            None => make_key(file).map_err(|e| bad(format!("could not be made: {e}")))?,
        };
        let vault = Vault::new(&key)?;
        match check {
            Some(sealed) => match vault.open(&[CHECK], &sealed) {
                Ok(text) if text.expose() == CHECK_TEXT => {}
                _ => {
                    let reason = "is not the key that this database's secrets are sealed with: name the \
                                  right one with --vault-key";
                    return Err(bad(reason.to_owned()));
                }
            },
            None => self.set_mark(CHECK, &vault.seal(&[CHECK], CHECK_TEXT)?).await?,
        }
        // Unlocked before: the same key, or the check would have failed.
        let _ = self.vault.set(vault);
        Ok(())
    }

    /// The open vault.
    pub(crate) fn vault(&self) -> Result<&Vault, StoreError> {
        self.vault.get().ok_or_else(locked)
    }

    /// A tag that only this key's holder can make, over a list of texts. The same after a restart.
    ///
    /// # Errors
    /// [`StoreError::Vault`] when it is not unlocked.
    pub fn sign(&self, parts: &[&str]) -> Result<Vec<u8>, StoreError> {
        Ok(hmac::sign(&self.vault()?.signs, &place(parts)).as_ref().to_vec())
    }

    /// Whether [`Db::sign`] made this tag over these texts; in constant time.
    ///
    /// # Errors
    /// [`StoreError::Vault`] when it is not unlocked.
    pub fn signed(&self, parts: &[&str], tag: &[u8]) -> Result<bool, StoreError> {
        Ok(hmac::verify(&self.vault()?.signs, &place(parts), tag).is_ok())
    }

    /// A number that changes when `text` does, and tells nothing of it. The same after a restart.
    ///
    /// # Errors
    /// [`StoreError::Vault`] when it is not unlocked.
    pub fn fingerprint(&self, text: &Secret) -> Result<u64, StoreError> {
        Ok(self.vault()?.print(text.expose()))
    }
}

pub(crate) fn locked() -> StoreError {
    StoreError::Vault("the vault is not open".to_owned())
}

/// The key in a file, if the file is there.
fn read_key(file: &Path) -> Result<Option<Zeroizing<[u8; KEY]>>, String> {
    let mut open = match File::open(file) {
        Ok(open) => open,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("could not be read: {error}")),
    };
    let about = open.metadata().map_err(|e| format!("could not be looked at: {e}"))?;
    if !about.is_file() {
        return Err("is not a file".to_owned());
    }
    // Whoever owns it can change it, and its mode. Folders above are the operator's to look after.
    let me = std::fs::metadata("/proc/self").map_or(0, |own| own.uid());
    if about.uid() != 0 && about.uid() != me {
        let owner = about.uid();
        return Err(format!("belongs to the user {owner}: chown it to the engine's own"));
    }
    if about.mode() & 0o077 != 0 {
        return Err("can be read by others than its owner: chmod 600 it".to_owned());
    }
    if about.len() != KEY as u64 {
        return Err(format!(
            "has {} bytes and not {KEY}: it is no key, or only a part of one",
            about.len()
        ));
    }
    let mut key = Zeroizing::new([0; KEY]);
    open.read_exact(&mut *key).map_err(|e| format!("could not be read: {e}"))?;
    Ok(Some(key))
}

/// Makes a key. It is whole on disk before it has its name, and never takes the place of another.
fn make_key(file: &Path) -> io::Result<Zeroizing<[u8; KEY]>> {
    let mut key = Zeroizing::new([0; KEY]);
    rand::fill(&mut *key).map_err(|_| io::Error::other("the host gave no random numbers"))?;
    let folder = file.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let draft = {
        let mut name = file.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.new", std::process::id()));
        folder.join(name)
    };
    let mut out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    let written = out
        .write_all(&*key)
        .and_then(|()| out.sync_all())
        .and_then(|()| std::fs::hard_link(&draft, file));
    std::fs::remove_file(&draft)?;
    written?;
    File::open(folder)?.sync_all()?;
    Ok(key)
}

/// A short name for a key, from its public half: for `kid`.
#[must_use]
pub fn short_hash(bytes: &[u8]) -> String {
    let hash = digest::digest(&digest::SHA256, bytes);
    hash.as_ref().iter().take(16).fold(String::new(), |mut out, byte| {
        use std::fmt::Write as _;
        let _ = write!(out, "{byte:02x}");
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_text_opens_in_its_own_row_only() {
        let vault = Vault::new(&[7; KEY]).unwrap();
        let sealed = vault.seal(&["secrets", "a", "bc"], "hunter2").unwrap();
        assert!(sealed.starts_with(VERSION) && !sealed.contains("hunter2"));
        let row = ["secrets", "a", "bc"];
        assert_eq!(vault.open(&row, &sealed).unwrap().expose(), "hunter2");
        assert_ne!(sealed, vault.seal(&row, "hunter2").unwrap(), "a nonce is never used twice");
        for other in [&["secrets", "ab", "c"][..], &["secrets", "a", "b"], &["values", "a", "bc"]] {
            assert!(vault.open(other, &sealed).is_err(), "{other:?}");
        }
        let other = Vault::new(&[8; KEY]).unwrap();
        let error = other.open(&row, &sealed).unwrap_err().to_string();
        assert!(error.contains("another key"), "{error}");
        let mut bytes = STANDARD.decode(&sealed[3..]).unwrap();
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            assert!(vault.open(&row, &format!("v1.{}", STANDARD.encode(&bytes))).is_err(), "{at}");
            bytes[at] ^= 1;
        }
        for bad in ["", "v1.", "v2.AAAA", "v1.AAAA", "v1.%", "hunter2"] {
            assert!(vault.open(&row, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_key_file_of_somebody_else_or_for_all_to_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        assert!(read_key(&file).unwrap().is_none());
        make_key(&file).unwrap();
        assert!(read_key(&file).unwrap().is_some());
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o640);
        std::fs::set_permissions(&file, mode).unwrap();
        assert!(read_key(&file).unwrap_err().contains("chmod 600"));
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        // Only root can give a file away; for others the rest was the test.
        if std::os::unix::fs::chown(&file, Some(12_345), None).is_ok() {
            let why = read_key(&file).unwrap_err();
            assert!(why.contains("user 12345"), "{why}");
        }
    }

    #[test]
    fn prints_differ_by_text_and_key() {
        let (a, b) = (Vault::new(&[1; KEY]).unwrap(), Vault::new(&[2; KEY]).unwrap());
        assert_eq!(a.print("x"), a.print("x"));
        assert_ne!(a.print("x"), a.print("y"));
        assert_ne!(a.print("x"), b.print("x"));
        assert_eq!(a.id("t", "x"), a.id("t", "x"));
        assert!(a.id("t", "x") != a.id("u", "x") && a.id("t", "x") != a.id("t", "y"));
        assert_ne!(a.id("t", "x"), b.id("t", "x"));
    }
}
