//! A disk whose power can be cut: a data folder lies on it, and at any moment a picture of what has
//! reached the disk can be taken, to be opened as if the machine had just been started again.
//!
//! Invariant: a picture holds nothing that was only in memory: neither pages of the file system that
//! holds the data folder nor, with [`Cache::Lost`], what that file system wrote without a flush.
//! Everything lies in one folder, and dropping the disk, also in a failing test, leaves nothing of it
//! on the machine. Called by `crates/bivouac/tests/it/power.rs`.
//!
//! How: `disk.img` on the machine's own file system holds a btrfs (it can clone a file in one step),
//! with `drive.img` in it, read and written past the page cache through a loop device: that is the
//! platter. With [`Cache::Kept`] the ext4 of the data folder lies on it directly. With [`Cache::Lost`]
//! there is one more ext4 between, whose page cache plays the disk's own: what is written and not
//! flushed stays there, or goes down in any order. The picture is a clone of `drive.img`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::ioctl_ficlone;
use rustix::mount::{UnmountFlags, unmount};
use tempfile::TempDir;

/// Apparent size of the file that holds everything; it takes what is written.
const WHOLE: u64 = 24 << 30;
/// Apparent size of the platter.
const PLATTER: u64 = 9 << 30;
/// Apparent size of the disk behind a volatile cache: the platter less what its file system needs.
const BEHIND: u64 = 8 << 30;
/// How long an unmount may be refused because somebody is still leaving.
const LEAVE: Duration = Duration::from_secs(20);

/// What a cut does to writes that the disk has got and was not told to flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// They stay: a disk without a cache, or one with a battery.
    Kept,
    /// They are lost, all or some, in any order.
    Lost,
}

/// See the module.
#[derive(Debug)]
pub struct PowerDisk {
    // In the order in which they are let go.
    host: Stack,
    base: Layer,
    dir: TempDir,
    pictures: u32,
}

/// What was on the disk at one moment.
#[derive(Debug)]
pub struct Picture {
    file: PathBuf,
    cache: Cache,
}

/// A picture that is mounted: the machine after the cut.
#[derive(Debug)]
pub struct Restored {
    host: Stack,
    _picture: Picture,
}

/// A file system on a loop device, mounted.
#[derive(Debug)]
struct Layer {
    at: PathBuf,
}

/// The platter's file systems.
#[derive(Debug)]
struct Stack {
    top: Layer,
    _behind: Option<Layer>,
    cache: Cache,
}

fn run(program: &str, args: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    let output = command.args(args).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("start {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not text", path.display()))
}

fn sparse(path: &Path, bytes: u64) -> Result<()> {
    let file = File::options().write(true).create_new(true).open(path);
    Ok(file.with_context(|| format!("make {}", path.display()))?.set_len(bytes)?)
}

/// A small journal and few inodes: the file is made anew for each test.
fn ext4(path: &Path) -> Result<()> {
    let lazy = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
    let args = ["-q", "-F", "-b", "4096", "-m", "0", "-N", "20000", "-J", "size=32", "-E", lazy];
    run("mkfs.ext4", &[&args[..], &[text(path)?]].concat()).map(drop)
}

impl Layer {
    /// Mounts what is in `file`. `direct`: past the page cache of the file system that holds it.
    fn mount(file: &Path, at: &Path, kind: &str, options: &str, direct: bool) -> Result<Self> {
        std::fs::create_dir(at).with_context(|| format!("make {}", at.display()))?;
        let io = if direct { "--direct-io=on" } else { "--direct-io=off" };
        let file = text(file)?;
        let device = run("losetup", &["--find", "--show", "--sector-size=4096", io, file])?;
        let mounted = || -> Result<Self> {
            let name = device.trim_start_matches("/dev/");
            let is = std::fs::read_to_string(format!("/sys/block/{name}/loop/dio"))?;
            ensure!((is.trim() == "1") == direct, "{device} over {file}: direct I/O is {is}");
            run("mount", &["-t", kind, "-o", options, &device, text(at)?])?;
            Ok(Self { at: at.to_owned() })
        };
        let mounted = mounted();
        // A device in use goes with its last user.
        let let_go = run("losetup", &["-d", &device]);
        let mounted = mounted?;
        let_go?;
        Ok(mounted)
    }
}

impl Drop for Layer {
    #[allow(clippy::print_stderr, reason = "what a person needs to see when a test fails")]
    fn drop(&mut self) {
        let start = Instant::now();
        loop {
            match unmount(&self.at, UnmountFlags::empty()) {
                Err(rustix::io::Errno::BUSY) if start.elapsed() < LEAVE => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Ok(()) => return,
                Err(error) => {
                    eprintln!("{} had to be let go by force: {error}", self.at.display());
                    let _ = unmount(&self.at, UnmountFlags::DETACH);
                    return;
                }
            }
        }
    }
}

impl Stack {
    /// Mounts what is on a platter; an empty one is formatted first.
    fn mount(platter: &Path, dir: &Path, cache: Cache, empty: bool) -> Result<Self> {
        const OPTIONS: &str = "noatime,noinit_itable";
        if empty {
            ext4(platter)?;
        }
        std::fs::create_dir(dir)?;
        if cache == Cache::Kept {
            let top = Layer::mount(platter, &dir.join("host"), "ext4", OPTIONS, true)?;
            return Ok(Self { top, _behind: None, cache });
        }
        let behind = Layer::mount(platter, &dir.join("cache"), "ext4", OPTIONS, true)?;
        let image = behind.at.join("behind.img");
        if empty {
            sparse(&image, BEHIND)?;
            ext4(&image)?;
            File::open(&image)?.sync_all()?;
        }
        let top = Layer::mount(&image, &dir.join("host"), "ext4", OPTIONS, false)?;
        Ok(Self { top, _behind: Some(behind), cache })
    }
}

impl PowerDisk {
    /// Makes one. Needs root, `mkfs.btrfs`, `mkfs.ext4` and `losetup`.
    ///
    /// # Errors
    /// What one of them says; nothing is left then.
    pub fn make(cache: Cache) -> Result<Self> {
        Self::make_in(&std::env::temp_dir(), cache)
    }

    /// As [`PowerDisk::make`], in this folder.
    ///
    /// # Errors
    /// As there.
    pub fn make_in(folder: &Path, cache: Cache) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("bivouac-power-").tempdir_in(folder)?;
        let (image, base) = (dir.path().join("disk.img"), dir.path().join("base"));
        sparse(&image, WHOLE)?;
        run("mkfs.btrfs", &["-q", "-m", "single", "-d", "single", text(&image)?])?;
        // Without checksums its direct writes go straight down.
        let base = Layer::mount(&image, &base, "btrfs", "noatime,nodatacow", true)?;
        let platter = base.at.join("drive.img");
        sparse(&platter, PLATTER)?;
        let host = Stack::mount(&platter, &dir.path().join("machine"), cache, true)?;
        Ok(Self { host, base, dir, pictures: 0 })
    }

    /// A folder on it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.host.top.at
    }

    /// What a cut of the power at this moment would leave.
    ///
    /// # Errors
    /// As FICLONE.
    pub fn picture(&mut self) -> Result<Picture> {
        self.pictures += 1;
        let file = self.base.at.join(format!("picture-{}.img", self.pictures));
        let from = File::open(self.base.at.join("drive.img"))?;
        let to = File::options().write(true).create_new(true).open(&file)?;
        ioctl_ficlone(&to, &from).with_context(|| format!("clone into {}", file.display()))?;
        Ok(Picture { file, cache: self.host.cache })
    }

    /// Mounts a picture, as the next start of the machine would. The picture goes with it.
    ///
    /// # Errors
    /// As mount(8): a file system that cannot be mounted is a failure of the test.
    pub fn open(&self, picture: Picture) -> Result<Restored> {
        let name = picture.file.file_stem().context("a name")?;
        let folder = self.dir.path().join(name);
        let host = Stack::mount(&picture.file, &folder, picture.cache, false)
            .context("mount what a cut left")?;
        Ok(Restored { host, _picture: picture })
    }
}

impl Restored {
    /// The folder that [`PowerDisk::folder`] was.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.host.top.at
    }
}

impl Drop for Picture {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}
