//! A file that has its name when it is whole, and not before.
//!
//! Invariant: until [`Beside::keep`] it lies beside its place under another name, and goes when it is dropped: also
//! when the verb is interrupted. Used by whatever is fetched.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::client::random_word;
use super::failure::{Explain as _, Outcome};

/// A file on its way.
#[derive(Debug)]
pub(crate) struct Beside {
    target: PathBuf,
    path: PathBuf,
    file: File,
}

impl Beside {
    /// Begins a file that is to be `target`.
    ///
    /// # Errors
    /// When it cannot be written in that folder.
    pub(crate) fn new(target: &Path) -> Outcome<Self> {
        let folder = target.parent().filter(|f| !f.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let path = folder.join(format!(".bivouac-{}", random_word()?));
        let file =
            File::create_new(&path).explain(|| format!("could not write {}", target.display()))?;
        Ok(Self { target: target.to_owned(), path, file })
    }

    /// What is written to, without holding up whatever else goes on.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub(crate) fn writer(&self) -> Outcome<tokio::fs::File> {
        let file = self.file.try_clone();
        let file = file.explain(|| format!("could not write {}", self.target.display()))?;
        Ok(tokio::fs::File::from_std(file))
    }

    /// It is whole, and its writer flushed: on disk, and under its own name.
    ///
    /// # Errors
    /// When it cannot be flushed or renamed; it is gone then.
    pub(crate) fn keep(self) -> Outcome<()> {
        let shown = || format!("could not write {}", self.target.display());
        self.file.sync_all().explain(shown)?;
        std::fs::rename(&self.path, &self.target).explain(shown)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // After a rename there is nothing of that name; it is random.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test]
    async fn half_a_file_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("file");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        let half = Beside::new(&target).unwrap();
        half.writer().unwrap().write_all(b"half").await.unwrap();
        assert!(!target.exists() && names() == 1);
        drop(half);
        assert_eq!(names(), 0);
        let whole = Beside::new(&target).unwrap();
        let mut writer = whole.writer().unwrap();
        writer.write_all(b"whole").await.unwrap();
        writer.flush().await.unwrap();
        whole.keep().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"whole");
        assert_eq!(names(), 1);
    }
}
