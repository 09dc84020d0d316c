//! The daemon's admin interface, with its errors in words.

use crate::failure::Failure;
use reknit_client::{Daemons, root_cause};
use reknit_proto::v1::admin_client::AdminClient;
use reknit_proto::v1::daemon::Role;
use reknit_proto::v1::{Daemon, GetDaemonRequest};
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

pub(crate) type Admin = AdminClient<Channel>;

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// An answer may be as large as a big job's layout.
const MESSAGE_LIMIT: usize = 64 << 20;

/// Connects to the daemon that leads, or to one in stand-by while nobody does: that one still answers what the store
/// tells. `addresses`: such as `http://127.0.0.1:7400`, several separated by commas.
pub(crate) async fn connect(addresses: &str) -> Result<Admin, Failure> {
    let mut daemons: Daemons = addresses.parse().map_err(Failure::usage)?;
    let mut stand_by = None;
    let mut problem = String::new();
    // Every address once, and whatever leader each of them names.
    for _ in 0..2 * daemons.count() {
        let tried = daemons.address().to_owned();
        let leader = match ask(&daemons).await {
            Ok((admin, daemon)) => match daemon.role() {
                Role::Leading => return Ok(admin),
                Role::StandBy => {
                    stand_by = Some(admin);
                    Some(daemon.leader)
                }
                // Of a newer daemon: it will say so itself.
                Role::Unspecified => return Ok(admin),
            },
            Err(cause) => {
                problem = format!("no daemon answers at {tried} ({cause})");
                None
            }
        };
        daemons.failed(leader.as_deref().filter(|leader| !leader.is_empty()));
    }
    stand_by.ok_or_else(|| {
        Failure::Unreachable(format!(
            "{problem}: start reknitd there, or name the right address with --daemon or REKNIT_DAEMON"
        ))
    })
}

async fn ask(daemons: &Daemons) -> Result<(Admin, Daemon), String> {
    let asked = async {
        let channel = daemons.endpoint().connect().await.map_err(|error| root_cause(&error))?;
        let mut admin = AdminClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
        let daemon = admin.get_daemon(GetDaemonRequest {}).await;
        let daemon = daemon.map_err(|status| status.message().to_owned())?.into_inner();
        Ok((admin, daemon))
    };
    match timeout(CONNECT_LIMIT, asked).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("no answer within {CONNECT_LIMIT:?}")),
    }
}

/// The daemon's refusal of a request.
pub(crate) fn refused(status: Status) -> Failure {
    let message = status.message().to_owned();
    match status.code() {
        Code::InvalidArgument => Failure::Usage(message),
        Code::Unavailable => {
            Failure::Unreachable(format!("the daemon does not carry this out now: {message}"))
        }
        code => {
            Failure::Failed(if message.is_empty() { format!("the daemon answered: {code}") } else { message })
        }
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
