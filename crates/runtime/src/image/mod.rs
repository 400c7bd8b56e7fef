//! Images: the read-only trees under every upper.
//!
//! Owns: the `host` image (the host's `/usr` below a fresh tree, nothing to build), the folder of built
//! images that engines of one machine share, their build, the import of OCI images, and their mounts. Invariant: a built image is
//! never changed, only replaced by another one with another digest, and never removed while an upper of
//! any engine lies on it. Called by `linux` (layers, mounts) and by `bivouac image` (build, list, remove).

pub mod blobs;
pub mod build;
pub mod folder;
pub(crate) mod host;
pub(crate) mod mounts;
pub mod oci;

pub use folder::{ImageFolder, Manifest, Origin, OriginLayer};

pub use bivouac_types::image::{HOST, UNIVERSAL};
