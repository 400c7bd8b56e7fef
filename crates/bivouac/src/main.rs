//! The one executable: first its hidden roles, then the command line.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // Before any thread exists; a process with a role does not come back.
    bivouac_runtime::roles::maybe_run(&bivouac::role::shim::Keeper);
    bivouac::cli::main()
}
