//! The daemon's admin interface, with its errors in words.

use crate::failure::Failure;
use reknit_client::{BadAddress, Daemons, root_cause};
use reknit_proto::v1::admin_client::AdminClient;
use reknit_proto::v1::daemon::Role;
use reknit_proto::v1::{Daemon, GetDaemonRequest};
use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::fmt;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

pub(crate) type Admin = AdminClient<Channel>;

/// Any daemon says at once what it is.
const ANSWER_LIMIT: Duration = Duration::from_millis(2500);
/// An answer may be as large as a big job's layout.
const MESSAGE_LIMIT: usize = 64 << 20;

/// What is at an address.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) address: String,
    pub(crate) answer: Result<(Admin, Daemon), Silence>,
}

impl Asked {
    pub(crate) fn leads(&self) -> bool {
        self.answer.as_ref().is_ok_and(|(_, daemon)| match daemon.role() {
            Role::Leading => true,
            Role::StandBy | Role::Unspecified => false,
        })
    }
}

/// Why a daemon did not say what it is.
#[derive(Debug)]
pub(crate) enum Silence {
    /// Nobody listens there: why.
    Nobody(String),
    /// Somebody listens, and says nothing.
    Late,
    /// Not a daemon, or one of another version: what it says.
    Strange(String),
}

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nobody(cause) | Self::Strange(cause) => f.write_str(cause),
            Self::Late => write!(f, "no answer within {ANSWER_LIMIT:?}"),
        }
    }
}

impl Silence {
    fn remedy(&self) -> &'static str {
        match self {
            Self::Nobody(_) => {
                "start reknitd there, or name the right address with --daemon or REKNIT_DAEMON"
            }
            Self::Late => "reknitd or its machine may be stopped or overloaded",
            Self::Strange(_) => "is that a reknitd of this version?",
        }
    }
}

/// How much of a cluster's daemons is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    OneLeads,
    AllAreAsked,
}

/// Asks each daemon what it is, and each leader that one of them names. `addresses`: such as `http://127.0.0.1:7400`,
/// several separated by commas.
pub(crate) async fn ask_each(addresses: &str, until: Until) -> Result<Vec<Asked>, Failure> {
    let given: Daemons = addresses.parse().map_err(Failure::usage)?;
    let mut waiting: VecDeque<String> = given.to_string().split(',').map(str::to_owned).collect();
    let mut asked: Vec<Asked> = Vec::new();
    while let Some(address) = waiting.pop_front() {
        if asked.iter().any(|asked| asked.address == address) {
            continue;
        }
        let answer = ask(&address).await;
        if let Ok((_, daemon)) = &answer
            && !daemon.leader.is_empty()
        {
            match until {
                Until::OneLeads => waiting.push_front(daemon.leader.clone()),
                Until::AllAreAsked => waiting.push_back(daemon.leader.clone()),
            }
        }
        asked.push(Asked { address, answer });
        if until == Until::OneLeads && asked.last().is_some_and(Asked::leads) {
            break;
        }
    }
    Ok(asked)
}

/// Connects to the daemon that leads, or to one in stand-by while nobody does: that one still answers what the store
/// tells.
pub(crate) async fn connect(addresses: &str) -> Result<Admin, Failure> {
    let mut asked = ask_each(addresses, Until::OneLeads).await?;
    // The leader is the last one. One of a newer daemon's roles will say itself what it does not do.
    let answers = asked.iter().rposition(|asked| asked.answer.is_ok());
    match answers.map(|at| asked.swap_remove(at).answer) {
        Some(Ok((admin, _))) => Ok(admin),
        Some(Err(_)) | None => Err(Failure::Unreachable(nobody_answers(&asked))),
    }
}

/// Who does not answer, and what to do.
fn nobody_answers(asked: &[Asked]) -> String {
    let mut by_remedy: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for Asked { address, answer } in asked {
        if let Err(silence) = answer {
            by_remedy.entry(silence.remedy()).or_default().push(format!("{address} ({silence})"));
        }
    }
    let told = by_remedy.into_iter();
    let told = told.map(|(remedy, who)| format!("no daemon answers at {}: {remedy}", who.join(", ")));
    told.collect::<Vec<_>>().join("; ")
}

async fn ask(address: &str) -> Result<(Admin, Daemon), Silence> {
    let asked = async {
        let daemon: Result<Daemons, BadAddress> = address.parse();
        let daemon = daemon.map_err(|bad| Silence::Nobody(bad.to_string()))?;
        let channel = daemon.endpoint().connect().await;
        let channel = channel.map_err(|error| Silence::Nobody(root_cause(&error)))?;
        let mut admin = AdminClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
        let daemon = admin.get_daemon(GetDaemonRequest {}).await;
        let daemon = daemon.map_err(|status| Silence::Strange(words(&status)))?;
        Ok((admin, daemon.into_inner()))
    };
    timeout(ANSWER_LIMIT, asked).await.unwrap_or(Err(Silence::Late))
}

/// What the daemon said, or what happened to the connection.
fn words(status: &Status) -> String {
    match (status.source(), status.message()) {
        (Some(error), _) => root_cause(error),
        (None, "") => status.code().to_string(),
        (None, message) => message.to_owned(),
    }
}

/// The daemon's refusal of a request.
pub(crate) fn refused(status: Status) -> Failure {
    let words = words(&status);
    if status.source().is_some() {
        return Failure::Unreachable(format!(
            "the daemon was lost before it answered ({words}): whether it has done it is unknown"
        ));
    }
    match status.code() {
        Code::InvalidArgument => Failure::Usage(words),
        Code::Unavailable => Failure::Unreachable(format!("the daemon does not carry this out now: {words}")),
        _ => Failure::Failed(words),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nobody_listens() {
        // The port was just free and is not listened on.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error = connect(&format!("http://127.0.0.1:{port}")).await.unwrap_err();
        assert_eq!(error.exit_status(), 69);
        assert!(error.to_string().contains(&port.to_string()), "{error}");
    }

    #[tokio::test]
    async fn one_that_is_silent_may_be_stopped_and_is_asked_once() {
        // Connections are made, and nobody takes them: as of a stopped process.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let began = std::time::Instant::now();
        let error = connect(&address).await.unwrap_err().to_string();
        assert!(began.elapsed() < 2 * ANSWER_LIMIT, "it was asked again");
        assert!(error.contains(&address) && error.contains("may be stopped"), "{error}");
        assert!(!error.contains("start reknitd"), "{error}");
    }

    #[tokio::test]
    async fn those_that_do_not_answer_are_told_by_what_is_to_do() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let silent = format!("http://{}", listener.local_addr().unwrap());
        let gone = || {
            let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            format!("http://{}", gone.local_addr().unwrap())
        };
        let (a, b) = (gone(), gone());
        let error = connect(&format!("{a},{silent},{b}")).await.unwrap_err().to_string();
        let told: Vec<_> = error.split("; ").collect();
        assert_eq!(told.len(), 2, "{error}");
        assert!(told[1].contains(&a) && told[1].contains(&b) && told[1].contains("start reknitd"), "{error}");
        assert!(told[0].contains(&silent) && !told[0].contains(&a), "{error}");
    }

    #[test]
    fn a_lost_connection_is_no_refusal() {
        let lost = Status::from_error(Box::new(std::io::Error::other("broken pipe")));
        let failure = refused(lost);
        assert_eq!(failure.exit_status(), 69);
        assert!(failure.to_string().contains("broken pipe"), "{failure}");
        let error = refused(Status::unavailable("this daemon is in stand-by")).to_string();
        assert_eq!(error, "the daemon does not carry this out now: this daemon is in stand-by");
    }

    #[tokio::test]
    async fn no_address() {
        for wrong in
            ["not an address", "nonsense", "127.0.0.1:1", "https://127.0.0.1:1", "http://127.0.0.1", ""]
        {
            let error = connect(wrong).await.unwrap_err();
            assert_eq!(error.exit_status(), 64, "{wrong}");
            assert!(error.to_string().contains("write http://HOST:PORT"), "{error}");
        }
    }
}
