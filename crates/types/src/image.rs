//! Names of images and runtimes, as clients write them.
//!
//! Invariant: a name means one image and at most one runtime, and what no image of ours can give is no
//! name. Called by the engine (what to start from, what is first on PATH) and by the image's build.

/// Image that needs no build: the host's own `/usr`.
pub const HOST: &str = "host";
/// Image that holds every runtime.
pub const UNIVERSAL: &str = "universal";
/// What clients may ask for as `runtime`. All of them are in the universal image.
pub const RUNTIMES: [&str; 4] = ["node22", "node24", "node26", "python3.13"];
/// The runtime of a create that names none.
pub const DEFAULT_RUNTIME: &str = "node24";
/// Folder of the runtimes inside; each has a `bin`.
pub const RUNTIMES_FOLDER: &str = "/vercel/runtimes";
/// PATH behind the runtime's own folder.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Where clients get managed images from; may be left out.
const REGISTRY: &str = "vcr.vercel.com/";
/// Names of managed images begin so.
const MANAGED: &str = "vercel/sandbox/";

/// Managed images that the universal one stands for, and the runtime of each.
const STANDS_FOR: [(&str, Option<&str>); 7] = [
    ("universal", None),
    ("ubuntu", None),
    ("node:22", Some("node22")),
    ("node:24", Some("node24")),
    ("node:26", Some("node26")),
    ("python:3.13", Some("python3.13")),
    // Without a tag: the newest.
    ("python", Some("python3.13")),
];

/// What a client means by an image's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named<'a> {
    /// The universal image, with a runtime first on PATH.
    Universal(Option<&'static str>),
    /// A managed image that this engine cannot give.
    Unmanaged,
    /// The engine's own name of an image, with or without `@digest`.
    Own(&'a str),
}

/// Reads an image's name.
#[must_use]
pub fn named(name: &str) -> Named<'_> {
    let Some(rest) = name.strip_prefix(REGISTRY).unwrap_or(name).strip_prefix(MANAGED) else {
        return Named::Own(name);
    };
    let rest = rest.strip_suffix(":latest").unwrap_or(rest);
    match STANDS_FOR.iter().find(|(known, _)| *known == rest) {
        Some((_, runtime)) => Named::Universal(*runtime),
        None if rest == "node" => Named::Universal(Some("node26")),
        None => Named::Unmanaged,
    }
}

/// All managed names that [`named`] knows, for messages.
#[must_use]
pub fn managed_names() -> Vec<String> {
    STANDS_FOR
        .iter()
        .filter(|(name, _)| *name != "python")
        .map(|(name, _)| format!("{MANAGED}{name}"))
        .collect()
}

/// The name of an image without the digest that pins its version here. The digest by which a registry knows
/// an image belongs to its name.
#[must_use]
pub fn plain(reference: &str) -> &str {
    match reference.rsplit_once('@') {
        // Nothing with a slash is a digest: it is the rest of a name with a user, which is refused elsewhere.
        Some((name, digest)) if !crate::oci::is_digest(digest) && !digest.contains('/') => name,
        _ => reference,
    }
}

/// PATH of a session: `runtime` is a runtime's name, or the name of the image that was asked for.
#[must_use]
pub fn path(image: &str, runtime: &str) -> String {
    if plain(image) != UNIVERSAL {
        return PATH.to_owned();
    }
    let known = RUNTIMES.into_iter().find(|name| *name == runtime);
    let own = known.or(match named(runtime) {
        Named::Universal(own) => own,
        Named::Unmanaged | Named::Own(_) => None,
    });
    format!("{RUNTIMES_FOLDER}/{}/bin:{PATH}", own.unwrap_or(DEFAULT_RUNTIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn managed_names_mean_the_universal_image() {
        let cases = [
            ("vercel/sandbox/universal", Named::Universal(None)),
            ("vercel/sandbox/universal:latest", Named::Universal(None)),
            ("vcr.vercel.com/vercel/sandbox/universal:latest", Named::Universal(None)),
            ("vercel/sandbox/ubuntu", Named::Universal(None)),
            ("vercel/sandbox/node:22", Named::Universal(Some("node22"))),
            ("vercel/sandbox/node:26", Named::Universal(Some("node26"))),
            ("vercel/sandbox/node", Named::Universal(Some("node26"))),
            ("vercel/sandbox/python:latest", Named::Universal(Some("python3.13"))),
            ("vercel/sandbox/python:3.14", Named::Unmanaged),
            ("vercel/sandbox/arch", Named::Unmanaged),
            ("vercel/sandbox/node:22:latest:latest", Named::Unmanaged),
            ("universal", Named::Own("universal")),
            ("team/prj/repo:tag", Named::Own("team/prj/repo:tag")),
        ];
        for (name, means) in cases {
            assert_eq!(named(name), means, "{name}");
        }
        for name in managed_names() {
            assert!(matches!(named(&name), Named::Universal(_)), "{name}");
        }
    }

    #[test]
    fn the_digest_of_a_registry_is_part_of_a_name() {
        assert_eq!(plain("universal@blake3:00"), "universal");
        assert_eq!(plain("universal"), "universal");
        let pinned = format!("docker://example.com/a@sha256:{}", "0".repeat(64));
        assert_eq!(plain(&pinned), pinned);
        assert_eq!(plain(&format!("{pinned}@blake3:00")), pinned);
        assert_eq!(plain("docker://user@example.com/a"), "docker://user@example.com/a");
    }

    #[test]
    fn the_runtime_that_was_asked_for_is_first() {
        let first = |image: &str, runtime: &str| {
            path(image, runtime).split(':').next().map(str::to_owned).unwrap_or_default()
        };
        assert_eq!(first("universal@blake3:00", "node22"), "/vercel/runtimes/node22/bin");
        assert_eq!(
            first("universal", "vercel/sandbox/python:3.13"),
            "/vercel/runtimes/python3.13/bin"
        );
        assert_eq!(first("universal", "universal"), "/vercel/runtimes/node24/bin");
        assert_eq!(first("universal", "../../x"), "/vercel/runtimes/node24/bin");
        assert_eq!(path("host", "node22"), PATH);
    }
}
