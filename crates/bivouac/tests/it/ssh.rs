//! SSH as people use it: OpenSSH's own clients against a real engine, through the API and by `--ssh`.

mod doors;
mod files;
mod forwards;
mod kit;
mod work;
