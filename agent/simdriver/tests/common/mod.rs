//! A simulated node and an unmodified NVML client of it, in this process.

use nvml_wrapper::Nvml;
use reknit_simdriver::state::{STATE_VARIABLE, State, Target};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A control file and the library's path. One for each process: the library reads one variable.
pub(crate) struct Node {
    folder: TempDir,
}

impl Node {
    pub(crate) fn new(gpus: usize) -> Self {
        let node = Self { folder: tempfile::tempdir().unwrap() };
        State::healthy("n0", gpus).save(&node.file()).unwrap();
        // SAFETY: each process has one test that makes a node, and no other thread reads the environment.
        #[allow(unsafe_code)]
        unsafe {
            std::env::set_var(STATE_VARIABLE, node.file());
        }
        node
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("state.json")
    }

    pub(crate) fn state(&self) -> State {
        State::load(&self.file()).unwrap()
    }

    pub(crate) fn change(&self, target: impl Into<Target>, assignment: &str) {
        State::update(&self.file(), |state| state.set(target, &[assignment.to_owned()])).unwrap();
    }

    pub(crate) fn client(&self) -> Result<Nvml, nvml_wrapper::error::NvmlError> {
        Nvml::builder().lib_path(library().as_os_str()).init()
    }
}

/// Cargo puts the library beside the test or one folder up.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder: &Path| folder.join("libreknit_simdriver.so")).find(|path| path.exists());
    found.expect("cargo builds the library with this test")
}
