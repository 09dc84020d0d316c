//! Every connection and every file that is mapped is an open file.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// From here on the process may open as many files as its hard limit allows. Where that cannot be had, the soft limit
/// holds.
pub fn allow_files() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, allowed = limit.current, "the limit of open files cannot be raised");
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
}
