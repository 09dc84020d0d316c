//! Every connection and every file that is mapped is an open file; and a file may not be allowed to grow.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::SIGXFSZ;
use std::sync::Arc;

/// From here on the process may open as many files as its hard limit allows. Where that cannot be had, the soft limit
/// holds.
pub fn allow_files() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, allowed = limit.current, "the limit of open files cannot be raised");
    }
}

/// From here on to write beyond the limit of a file's size is an error like a full disk, and not the end of the process.
pub fn outlive_full_files() {
    // Who catches the signal gets the error.
    if let Err(error) = signal_hook::flag::register(SIGXFSZ, Arc::default()) {
        tracing::warn!(%error, "a file that grows beyond its limit will end this process");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hard_limit_is_what_holds_then() {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
        allow_files();
        assert_eq!(getrlimit(Resource::Nofile).current, limit.maximum);
    }

    #[test]
    fn a_file_beyond_its_limit_is_an_error() {
        outlive_full_files();
        let most = 1 << 40;
        setrlimit(Resource::Fsize, Rlimit { current: Some(most), ..getrlimit(Resource::Fsize) }).unwrap();
        let path = std::env::temp_dir().join(format!("reknit-too-large-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = file.set_len(most + 1).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
    }
}
