//! The daemons of a cluster, one of which leads.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use tonic::Status;
use tonic::transport::Endpoint;

/// The metadata key under which a daemon in stand-by names the leader's address.
pub const LEADER: &str = "reknit-leader";

const CONNECT: Duration = Duration::from_secs(1);
/// A daemon that froze or whose machine is gone is noticed within the sum of both.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The daemons of a cluster, one of which leads: which of them to try next, and which leadership was seen last.
#[derive(Debug, Clone)]
pub struct Daemons {
    addresses: Vec<Address>,
    at: usize,
    /// Where the last one said that the leader is.
    pointed: Option<Address>,
    /// Tries since the last success.
    failed: usize,
    term: u64,
}

#[derive(Debug, Clone)]
struct Address {
    text: String,
    endpoint: Endpoint,
}

/// No list of daemon addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no address of a daemon: write http://HOST:PORT, or several separated by commas")]
pub struct BadAddress(String);

/// What is worth doing after a failed try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Another daemon may answer.
    AtOnce,
    /// Each was tried.
    AfterAPause,
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let bad = || BadAddress(text.to_owned());
        let endpoint = Endpoint::from_shared(text.to_owned()).map_err(|_| bad())?;
        if endpoint.uri().scheme_str() != Some("http") || endpoint.uri().port().is_none() {
            return Err(bad());
        }
        let endpoint = endpoint
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        Ok(Self { text: text.to_owned(), endpoint })
    }
}

/// Addresses separated by commas.
impl FromStr for Daemons {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let addresses = text.split(',').map(|address| address.trim().parse()).collect::<Result<_, _>>()?;
        Ok(Self { addresses, at: 0, pointed: None, failed: 0, term: 0 })
    }
}

/// As it is parsed.
impl fmt::Display for Daemons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<_> = self.addresses.iter().map(|address| address.text.as_str()).collect();
        f.write_str(&texts.join(","))
    }
}

impl Daemons {
    /// How many addresses are known.
    #[must_use]
    pub fn count(&self) -> usize {
        self.addresses.len()
    }

    /// The one to try now: the leader where one was named, else the one that answered last.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.current().text
    }

    /// [`Self::address`], ready to connect to.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.current().endpoint
    }

    fn current(&self) -> &Address {
        // Parsing gives at least one address, and `at` is below their number.
        self.pointed.as_ref().unwrap_or_else(|| &self.addresses[self.at])
    }

    /// A daemon welcomed us under this term. False when a later leadership was seen before: this leader does not know
    /// yet that it is none any more.
    #[must_use]
    pub fn welcomed(&mut self, term: u64) -> bool {
        if term < self.term {
            return false;
        }
        self.term = term;
        self.failed = 0;
        true
    }

    /// The daemon did not answer, refused, or ended the session. `leader`: where it says that the leader is.
    pub fn failed(&mut self, leader: Option<&str>) -> Next {
        let followed = self.pointed.take();
        let tried = followed.as_ref().unwrap_or(&self.addresses[self.at]).text.clone();
        let pointed = leader.and_then(|leader| leader.parse::<Address>().ok());
        match pointed.filter(|leader| leader.text != tried) {
            // One that is named by a named one comes after a pause: they may name each other.
            Some(leader) => {
                self.pointed = Some(leader);
                if followed.is_none() { Next::AtOnce } else { Next::AfterAPause }
            }
            None => {
                self.at = (self.at + 1) % self.addresses.len();
                self.failed += 1;
                if self.failed.is_multiple_of(self.addresses.len()) {
                    Next::AfterAPause
                } else {
                    Next::AtOnce
                }
            }
        }
    }
}

/// Where the daemon that refused with this status says that the leader is.
#[must_use]
pub fn leader(status: &Status) -> Option<&str> {
    status.metadata().get(LEADER).and_then(|value| value.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Daemons {
        "http://a:1, http://b:2".parse().unwrap()
    }

    #[test]
    fn addresses_are_checked() {
        assert_eq!(two().to_string(), "http://a:1,http://b:2");
        for wrong in ["", "a:1", "https://a:1", "http://a", "http://a:1,", "http://a:1,nonsense"] {
            let error = wrong.parse::<Daemons>().unwrap_err();
            assert!(error.to_string().ends_with("separated by commas"), "{error}");
        }
    }

    #[test]
    fn each_is_tried_before_a_pause() {
        let mut daemons = two();
        assert_eq!(daemons.address(), "http://a:1");
        assert_eq!(daemons.failed(None), Next::AtOnce);
        assert_eq!(daemons.address(), "http://b:2");
        assert_eq!(daemons.failed(None), Next::AfterAPause);
        assert_eq!(daemons.address(), "http://a:1");
    }

    #[test]
    fn the_one_that_answered_is_tried_first_again() {
        let mut daemons = two();
        daemons.failed(None);
        assert!(daemons.welcomed(1));
        assert_eq!(daemons.address(), "http://b:2");
        assert_eq!(daemons.failed(None), Next::AtOnce);
    }

    #[test]
    fn the_leader_is_followed_and_a_circle_is_not_run_in() {
        let mut daemons = two();
        assert_eq!(daemons.failed(Some("http://c:3")), Next::AtOnce);
        assert_eq!(daemons.address(), "http://c:3");
        assert_eq!(daemons.failed(Some("http://a:1")), Next::AfterAPause);
        assert_eq!(daemons.address(), "http://a:1");
        // It names itself, or nonsense: on to the next.
        assert_eq!(daemons.failed(Some("http://a:1")), Next::AtOnce);
        assert_eq!(daemons.address(), "http://b:2");
        assert_eq!(daemons.failed(Some("\u{7f}")), Next::AfterAPause);
        assert_eq!(daemons.address(), "http://a:1");
    }

    #[test]
    fn an_older_leadership_is_left() {
        let mut daemons = two();
        assert!(daemons.welcomed(7));
        assert!(!daemons.welcomed(6));
        assert!(daemons.welcomed(7));
        assert!(daemons.welcomed(8));
    }
}
