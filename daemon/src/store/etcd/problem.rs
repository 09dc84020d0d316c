//! What an error of etcd means, and what to do about it.

use crate::store::StoreError;
use etcd_client::Error;
use reknit_client::root_cause;
use tonic::Status;

const PLAIN: &str = "check that it runs, and --endpoints: https:// where it has TLS";
const SECURE: &str = "check that it runs, --endpoints, and --etcd-ca, --etcd-cert and --etcd-key";
const PASSWORD: &str = "check --etcd-user and what --etcd-password-file holds";
const NO_USER: &str = "give --etcd-user and --etcd-password-file";
const NO_USERS: &str =
    "enable etcd's users (etcdctl auth enable), or leave --etcd-user and --etcd-password-file out";
const PERMISSION: &str = "grant the role of --etcd-user (without it: of the certificate's common name) all below --etcd-prefix: etcdctl role grant-permission ROLE --prefix=true readwrite PREFIX";
const SPACE: &str = "compact and defragment it, then etcdctl alarm disarm";

/// Where, and whether by TLS.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) name: String,
    pub(super) secure: bool,
}

impl Place {
    /// Of a call that failed.
    pub(super) fn problem(&self, error: &Error) -> StoreError {
        match error {
            Error::GRpcStatus(status) => self.answered(status),
            // Said before anything is sent.
            Error::TransportError(error) => self.unreachable(root_cause(error)),
            other => self.unreachable(other.to_string()),
        }
    }

    /// Of a call that was not answered in time.
    pub(super) fn silent(&self) -> StoreError {
        self.unreachable("no answer".to_owned())
    }

    fn unreachable(&self, problem: String) -> StoreError {
        let remedy = if self.secure { SECURE } else { PLAIN };
        StoreError::Unreachable { place: self.name.clone(), problem, remedy }
    }

    fn answered(&self, status: &Status) -> StoreError {
        let told = status.message();
        // The words: some answers have lost their codes.
        let remedies = [
            ("authentication failed", PASSWORD),
            ("user name is empty", NO_USER),
            ("authentication is not enabled", NO_USERS),
            ("permission denied", PERMISSION),
            ("database space exceeded", SPACE),
        ];
        if let Some((_, remedy)) = remedies.into_iter().find(|(words, _)| told.contains(words)) {
            return StoreError::Refused { place: self.name.clone(), problem: told.to_owned(), remedy };
        }
        self.unreachable(match std::error::Error::source(status) {
            // Such as what is wrong with a certificate.
            Some(source) => root_cause(source),
            None if told.is_empty() => status.code().to_string(),
            None => told.to_owned(),
        })
    }
}

/// More than etcd takes at once. It says so in one way, and the gRPC server below it in another.
pub(super) fn is_too_large(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => {
            let told = status.message();
            told.contains("request is too large") || told.contains("message larger than max")
        }
        _ => false,
    }
}
