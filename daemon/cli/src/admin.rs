//! The daemon's admin interface, with its errors in words.

use crate::failure::Failure;
use reknit_proto::v1::admin_client::AdminClient;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

pub(crate) type Admin = AdminClient<Channel>;

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// An answer may be as large as a big job's layout.
const MESSAGE_LIMIT: usize = 64 << 20;

/// Connects to `address`, such as `http://127.0.0.1:7400`.
pub(crate) async fn connect(address: &str) -> Result<Admin, Failure> {
    let wrong = || Failure::Usage(format!("`{address}` is no address of a daemon: write http://HOST:PORT"));
    let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|_| wrong())?;
    if endpoint.uri().scheme_str() != Some("http") || endpoint.uri().port().is_none() {
        return Err(wrong());
    }
    let endpoint = endpoint.connect_timeout(CONNECT_LIMIT).tcp_nodelay(true);
    let channel = endpoint.connect().await.map_err(|error| {
        Failure::Unreachable(format!(
            "no daemon answers at {address} ({}): start reknitd there, or name the right address with --daemon or REKNIT_DAEMON",
            root_cause(&error)
        ))
    })?;
    Ok(AdminClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT))
}

/// The daemon's refusal of a request.
pub(crate) fn refused(status: Status) -> Failure {
    let message = status.message().to_owned();
    match status.code() {
        Code::InvalidArgument => Failure::Usage(message),
        Code::Unavailable => Failure::Unreachable(format!(
            "the daemon went away during the request ({message}): is reknitd still running?"
        )),
        code => {
            Failure::Failed(if message.is_empty() { format!("the daemon answered: {code}") } else { message })
        }
    }
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
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
            assert!(error.to_string().ends_with("write http://HOST:PORT"), "{error}");
        }
    }
}
