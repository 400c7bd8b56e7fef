//! Names, leases and leftovers of the images folder.

use super::*;

fn manifest(name: &str, fill: char, built_at: i64, bytes: u64) -> Manifest {
    Manifest {
        name: name.to_owned(),
        digest: format!("{ALGORITHM}{}", fill.to_string().repeat(64)),
        bytes,
        built_at,
        recipe: "r".to_owned(),
        architecture: "amd64".to_owned(),
        debian: "13.0".to_owned(),
        default_runtime: "node24".to_owned(),
        runtimes: BTreeMap::new(),
        tools: BTreeMap::new(),
        oci: None,
    }
}

struct Bed {
    _dir: tempfile::TempDir,
    folder: ImageFolder,
    data: PathBuf,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = ImageFolder::new(dir.path().join("images"));
        folder.ensure().unwrap();
        let data = dir.path().join("data");
        std::fs::create_dir(&data).unwrap();
        Self { _dir: dir, folder, data }
    }

    fn publish(&self, name: &str, fill: char, built_at: i64) -> Manifest {
        let manifest = manifest(name, fill, built_at, 4);
        let file = self.folder.path().join("made");
        std::fs::write(&file, "tree").unwrap();
        self.folder.publish(&manifest, &file).unwrap();
        manifest
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| !name.ends_with(".lock") && name != LEASES)
            .collect();
        names.sort();
        names
    }
}

#[test]
fn the_newest_of_a_name_is_the_one_that_is_meant() {
    let bed = Bed::new();
    assert!(bed.folder.list().unwrap().is_empty());
    let old = bed.publish("universal", 'a', 1);
    let new = bed.publish("universal", 'b', 2);
    let other = bed.publish("other", 'c', 3);
    let find = |wanted: &str| bed.folder.find(wanted).unwrap();
    assert_eq!(find("universal"), Some(new.clone()));
    assert_eq!(find(&old.reference()), Some(old.clone()));
    assert_eq!(find(&old.digest), Some(old));
    assert_eq!(find("other"), Some(other));
    assert_eq!(find("nope"), None);
    bed.folder.check(&new).unwrap();
}

#[test]
fn a_missing_folder_has_no_images() {
    let dir = tempfile::tempdir().unwrap();
    let folder = ImageFolder::new(dir.path().join("none"));
    assert!(folder.list().unwrap().is_empty());
    folder.sweep().unwrap();
    assert!(!folder.path().exists(), "a look makes nothing");
}

#[test]
fn a_damaged_file_is_told() {
    let bed = Bed::new();
    let image = bed.publish("universal", 'a', 1);
    std::fs::write(bed.folder.file(&image), "tre").unwrap();
    let said = bed.folder.check(&image).unwrap_err().to_string();
    assert!(said.contains("damaged") && said.contains("bivouac image rm"), "{said}");
    std::fs::remove_file(bed.folder.file(&image)).unwrap();
    let said = bed.folder.check(&image).unwrap_err().to_string();
    assert!(said.contains("gone"), "{said}");
}

#[test]
fn what_an_engine_keeps_is_not_removed() {
    let bed = Bed::new();
    let image = bed.publish("universal", 'a', 1);
    bed.folder.lease(&image, "engine", &bed.data).unwrap();
    assert_eq!(bed.folder.leased_by("engine").unwrap(), std::slice::from_ref(&image));
    assert!(bed.folder.leased_by("another").unwrap().is_empty());
    match bed.folder.remove(&image) {
        Err(RemoveError::InUse(leases)) => assert_eq!(leases[0].data_dir, bed.data),
        other => panic!("{other:?}"),
    }
    bed.folder.end_lease(&image, "engine").unwrap();
    bed.folder.end_lease(&image, "engine").unwrap();
    bed.folder.remove(&image).unwrap();
    assert!(bed.names().is_empty(), "{:?}", bed.names());
    assert!(matches!(bed.folder.remove(&image), Err(RemoveError::Missing)));
    let said = bed.folder.lease(&image, "engine", &bed.data).unwrap_err();
    assert_eq!(said.kind(), io::ErrorKind::NotFound, "a removed image cannot be kept");
}

#[test]
fn an_engine_whose_folder_is_gone_keeps_nothing() {
    let bed = Bed::new();
    let image = bed.publish("universal", 'a', 1);
    bed.folder.lease(&image, "engine", &bed.data).unwrap();
    std::fs::remove_dir(&bed.data).unwrap();
    assert!(bed.folder.leases(&image).unwrap().is_empty());
    // A lease that was cut short is one.
    std::fs::write(bed.folder.lease_dir(&image).join("cut"), "{").unwrap();
    assert!(matches!(bed.folder.remove(&image), Err(RemoveError::InUse(_))));
}

#[test]
fn what_a_crash_left_is_removed_and_nothing_else() {
    let bed = Bed::new();
    let image = bed.publish("universal", 'a', 1);
    let path = bed.folder.path();
    std::fs::create_dir(path.join("build-1.tmp")).unwrap();
    std::fs::write(path.join("build-1.tmp/image.erofs"), "half").unwrap();
    std::fs::write(path.join(format!("universal-{}.erofs", "b".repeat(64))), "orphan").unwrap();
    std::fs::write(path.join("universal-x.json.new"), "{").unwrap();
    std::fs::write(path.join("notes.txt"), "mine").unwrap();
    let held = bed.folder.try_lock_build().unwrap().unwrap();
    bed.folder.sweep().unwrap();
    assert_eq!(bed.names().len(), 6, "a build is at work: {:?}", bed.names());
    drop(held);
    bed.folder.sweep().unwrap();
    let stem = image.stem();
    assert_eq!(
        bed.names(),
        ["notes.txt".to_owned(), format!("{stem}.erofs"), format!("{stem}.json")]
    );
}

#[test]
fn what_an_import_left_is_removed_when_nobody_has_it() {
    let bed = Bed::new();
    let (path, held) = bed.folder.make_import().unwrap();
    let (other, gone) = bed.folder.make_import().unwrap();
    drop(gone);
    bed.folder.sweep().unwrap();
    assert!(path.exists() && !other.exists());
    drop(held);
    bed.folder.sweep().unwrap();
    assert!(bed.names().is_empty(), "{:?}", bed.names());
}

#[test]
fn two_names_of_a_tree_are_kept_each_by_itself() {
    use std::os::unix::fs::MetadataExt as _;
    let bed = Bed::new();
    let pulled = |name: &str| {
        let file_digest = format!("{ALGORITHM}{}", "e".repeat(64));
        let mut pulled = manifest(name, 'a', 1, 4);
        pulled.oci = Some(Origin { file_digest, ..Origin::default() });
        pulled
    };
    let (one, two) = (pulled("docker://example.com/a:1"), pulled("app:2"));
    assert!(!bed.folder.publish_again(&one).unwrap(), "there is no file");
    let file = bed.folder.path().join("made");
    std::fs::write(&file, "tree").unwrap();
    bed.folder.publish(&one, &file).unwrap();
    assert!(bed.folder.publish_again(&two).unwrap());
    assert_eq!(bed.folder.find("app:2").unwrap(), Some(two.clone()));
    let inode = |of: &Manifest| std::fs::metadata(bed.folder.file(of)).unwrap().ino();
    assert_eq!(inode(&one), inode(&two));
    bed.folder.lease(&one, "engine", &bed.data).unwrap();
    assert_eq!(bed.folder.leased_by("engine").unwrap(), std::slice::from_ref(&one));
    bed.folder.remove(&two).unwrap();
    assert!(matches!(bed.folder.remove(&one), Err(RemoveError::InUse(_))));
    bed.folder.check(&one).unwrap();
    bed.folder.sweep().unwrap();
    bed.folder.end_lease(&one, "engine").unwrap();
    bed.folder.remove(&one).unwrap();
    assert!(bed.names().is_empty(), "{:?}", bed.names());
    // A name that is another one's in disguise is none.
    let evil = pulled("docker://example.com/../a:1");
    let text = serde_json::to_vec(&evil).unwrap();
    std::fs::write(bed.folder.path().join(format!("{}.json", evil.stem())), text).unwrap();
    assert!(bed.folder.list().unwrap().is_empty());
}

#[test]
fn a_second_build_is_told_who_is_first() {
    let bed = Bed::new();
    let held = bed.folder.try_lock_build().unwrap().unwrap();
    let holder = bed.folder.try_lock_build().unwrap().unwrap_err();
    assert_eq!(holder, i32::try_from(std::process::id()).ok());
    drop(held);
    bed.folder.try_lock_build().unwrap().unwrap();
}

#[test]
fn a_manifest_cannot_lead_out_of_the_folder() {
    let bed = Bed::new();
    let mut evil = manifest("universal", 'a', 1, 4);
    evil.name = "../universal".to_owned();
    let text = serde_json::to_vec(&evil).unwrap();
    std::fs::write(bed.folder.path().join("x.json"), &text).unwrap();
    let honest = manifest("universal", 'a', 1, 4);
    // The content of one under the name of another.
    let name = format!("universal-{}.json", "b".repeat(64));
    std::fs::write(bed.folder.path().join(name), serde_json::to_vec(&honest).unwrap()).unwrap();
    std::fs::write(bed.folder.path().join("y.json"), "[]").unwrap();
    assert!(bed.folder.list().unwrap().is_empty());
}

#[test]
fn a_folder_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let bed = Bed::new();
    bed.publish("universal", 'a', 1);
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(bed.folder.path(), open).unwrap();
    let said = bed.folder.list().unwrap_err().to_string();
    assert!(said.contains("other users"), "{said}");
}
