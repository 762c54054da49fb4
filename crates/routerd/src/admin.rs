//! Where the admin API is reached, and by whom.

use anyhow::{Context, Result};
use microserving_daemon::Refused;
use tokio::net::lookup_host;

use crate::options::Options;

/// The shortest token.
const MIN_TOKEN_BYTES: usize = 8;

/// Where the admin API is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Door {
    /// On the main address.
    Main,
    /// On one of its own.
    Own(String),
    /// Nowhere: the main address can be reached from elsewhere.
    Nowhere,
}

/// Decides where the admin API is served.
pub(crate) async fn door(options: &Options, has_token: bool) -> Result<Door> {
    let Some(own) = &options.admin_listen else {
        return Ok(if is_loopback(&options.listen).await? { Door::Main } else { Door::Nowhere });
    };
    if !has_token && !is_loopback(own).await? {
        let message = format!(
            "--admin-listen {own} can be reached from elsewhere: give --admin-token or --admin-token-file"
        );
        return Err(Refused(message).into());
    }
    Ok(Door::Own(own.clone()))
}

/// Returns the token, from wherever it comes.
pub(crate) fn token(options: &Options) -> Result<Option<String>> {
    let token = match (&options.admin_token, &options.admin_token_file) {
        (Some(token), _) => Some(token.clone()),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the admin token from {}", path.display()))?;
            Some(text.trim().to_owned())
        }
        (None, None) => None,
    };
    if let Some(token) = &token
        && (token.len() < MIN_TOKEN_BYTES || !token.bytes().all(|byte| byte.is_ascii_graphic()))
    {
        let message =
            format!("the admin token must be {MIN_TOKEN_BYTES} or more printable characters without spaces");
        return Err(Refused(message).into());
    }
    Ok(token)
}

/// Says whether an address is this machine's own business, whatever it resolves to.
async fn is_loopback(address: &str) -> Result<bool> {
    let mut addresses =
        lookup_host(address).await.with_context(|| format!("{address} is no address"))?.peekable();
    Ok(addresses.peek().is_some() && addresses.all(|address| address.ip().is_loopback()))
}
