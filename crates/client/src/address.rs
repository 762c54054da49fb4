//! Where an engine is, what it is, and what holds for it alone.
//!
//! ```text
//! mlc+http://10.0.0.7:8001/prefix#recv_rank=4&model=llama
//! ─┬─ ───────────┬─────────────── ──────────┬────────────
//! kind     where it is reached      options of this engine
//! ```

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use http::Uri;

use crate::foreign::Names;
use crate::{BadUrl, EngineCalls, EngineKind, HttpEngineClient, MlcEngineClient, OpenAiEngineClient};

/// Where an engine is, what it is, and what holds for it alone.
///
/// ```
/// use microserving_client::{EngineAddress, EngineKind};
///
/// let address: EngineAddress = "mlc+http://10.0.0.7:8001#recv_rank=4".parse()?;
/// assert_eq!((address.kind, address.url.as_str(), address.recv_rank), (EngineKind::Mlc, "http://10.0.0.7:8001", 4));
/// assert_eq!(address.to_string(), "mlc+http://10.0.0.7:8001#recv_rank=4");
/// assert!("http://10.0.0.7:notaport".parse::<EngineAddress>().is_err());
/// # Ok::<(), microserving_client::BadUrl>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineAddress {
    /// What it is; `http://…` alone is an engine of ours.
    pub kind: EngineKind,
    /// Where it is reached: `http://host:port`, possibly with a path that goes before those of the calls.
    pub url: String,
    /// Its PE under PGAS transports, which only its operator knows.
    pub recv_rank: i64,
    /// The name under which clients ask for its model, if not the server's own. Giving one also says that it may answer beside engines of
    /// other kinds that serve this name.
    pub model: Option<String>,
    /// The server's own name of that model; its first one if not given.
    pub engine_model: Option<String>,
}

impl EngineAddress {
    /// Reads an address whose kind is told beside it: `kind` and a `KIND+` in front of the URL must not contradict each other.
    ///
    /// # Errors
    /// As `parse`, and if the two kinds differ.
    pub fn with_kind(text: &str, kind: Option<EngineKind>) -> Result<Self, BadUrl> {
        let mut address: Self = text.parse()?;
        if let Some(kind) = kind.filter(|kind| *kind != address.kind) {
            if text.starts_with("http://") && address.has_only_what_suits(kind) {
                address.kind = kind;
            } else {
                return Err(BadUrl { url: text.to_owned(), reason: format!("is not of the kind {kind}") });
            }
        }
        Ok(address)
    }

    const fn has_only_what_suits(&self, kind: EngineKind) -> bool {
        !matches!(kind, EngineKind::OpenAi) || self.recv_rank == 0
    }

    /// Makes the client. Connects on the first call.
    ///
    /// # Errors
    /// If the URL is none; an address that was parsed has been checked.
    pub fn connect(&self) -> Result<Arc<dyn EngineCalls>, BadUrl> {
        let http = HttpEngineClient::new(&self.url)?;
        let names = Names::new(self.model.clone(), self.engine_model.clone());
        Ok(match self.kind {
            EngineKind::Microserving => Arc::new(http),
            EngineKind::Mlc => Arc::new(MlcEngineClient::new(http, names)),
            EngineKind::OpenAi => Arc::new(OpenAiEngineClient::new(http, names)),
        })
    }
}

impl FromStr for EngineAddress {
    type Err = BadUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = |reason: String| BadUrl { url: text.to_owned(), reason };
        let (place, options) = match text.split_once('#') {
            None => (text, None),
            Some((place, options)) => (place, Some(options)),
        };
        let (kind, url) = match place.split_once("+http://") {
            None => (EngineKind::Microserving, place.to_owned()),
            Some((kind, rest)) => {
                let kind = kind.parse().map_err(|error: crate::BadKind| bad(error.to_string()))?;
                (kind, format!("http://{rest}"))
            }
        };
        let url = checked_url(&url).map_err(bad)?;
        let mut address = Self { kind, url, recv_rank: 0, model: None, engine_model: None };
        let mut seen = Vec::new();
        for option in options.into_iter().flat_map(|options| options.split('&')) {
            let (name, value) = option
                .split_once('=')
                .ok_or_else(|| bad(format!("the option {option:?} is not NAME=VALUE")))?;
            if seen.contains(&name) {
                return Err(bad(format!("the option {name} is given twice")));
            }
            seen.push(name);
            address.set(name, value).map_err(bad)?;
        }
        if address.engine_model.is_some() && address.model.is_none() {
            return Err(bad("the option engine_model needs model, the name that clients use".into()));
        }
        Ok(address)
    }
}

impl EngineAddress {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match (name, self.kind) {
            ("recv_rank", EngineKind::Microserving | EngineKind::Mlc) => {
                self.recv_rank = value
                    .parse()
                    .ok()
                    .filter(|rank| *rank >= 0)
                    .ok_or_else(|| format!("recv_rank is {value:?}, must be a whole number from 0"))?;
            }
            ("model" | "engine_model", EngineKind::Mlc | EngineKind::OpenAi) => {
                if value.is_empty() {
                    return Err(format!("{name} is empty"));
                }
                let field = if name == "model" { &mut self.model } else { &mut self.engine_model };
                *field = Some(value.to_owned());
            }
            ("recv_rank" | "model" | "engine_model", kind) => {
                return Err(format!("the option {name} is not one of {kind} engines"));
            }
            _ => return Err(format!("{name:?} is no option, must be recv_rank, model or engine_model")),
        }
        Ok(())
    }
}

impl fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind != EngineKind::Microserving {
            write!(f, "{}+", self.kind)?;
        }
        f.write_str(&self.url)?;
        let rank = (self.recv_rank != 0).then(|| self.recv_rank.to_string());
        let options = [("recv_rank", &rank), ("model", &self.model), ("engine_model", &self.engine_model)];
        let mut mark = '#';
        for (name, value) in options {
            if let Some(value) = value {
                write!(f, "{mark}{name}={value}")?;
                mark = '&';
            }
        }
        Ok(())
    }
}

/// Returns the URL without a slash at its end.
///
/// # Errors
/// With what is wrong, if it is not `http://host[:port][/path]`.
pub(crate) fn checked_url(url: &str) -> Result<String, String> {
    let base = url.trim_end_matches('/');
    let uri: Uri = base.parse().map_err(|error: http::uri::InvalidUri| error.to_string())?;
    if uri.scheme_str() != Some("http") {
        return Err("must begin with http://".into());
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err("has no host".into());
    }
    if uri.query().is_some() {
        return Err("must have no query".into());
    }
    if base.contains('#') {
        return Err("must have no fragment".into());
    }
    let authority = uri.authority().map_or("", http::uri::Authority::as_str);
    if authority.contains('@') {
        return Err("must have no user".into());
    }
    // The parser takes any text behind the colon and then says that there is no port.
    let behind_host = authority.rsplit_once(']').map_or(authority, |(_, rest)| rest);
    if let Some((_, port)) = behind_host.rsplit_once(':')
        && uri.port_u16().is_none_or(|port| port == 0)
    {
        return Err(format!("has the port {port:?}, must be in [1, 65535]"));
    }
    Ok(base.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> String {
        match text.parse::<EngineAddress>() {
            Ok(address) => {
                assert_eq!(address.to_string().parse::<EngineAddress>(), Ok(address.clone()), "{text}");
                assert!(address.connect().is_ok(), "{text}");
                format!(
                    "{} {} {} {:?} {:?}",
                    address.kind, address.url, address.recv_rank, address.model, address.engine_model
                )
            }
            Err(error) => error.reason,
        }
    }

    #[test]
    fn addresses_are_read_strictly() {
        for (text, expected) in [
            ("http://h:1", "microserving http://h:1 0 None None"),
            ("http://h:1/a/", "microserving http://h:1/a 0 None None"),
            ("http://[::1]:8001", "microserving http://[::1]:8001 0 None None"),
            ("http://h", "microserving http://h 0 None None"),
            ("microserving+http://h:1#recv_rank=2", "microserving http://h:1 2 None None"),
            ("mlc+http://h:1#recv_rank=4&model=llama", r#"mlc http://h:1 4 Some("llama") None"#),
            (
                "openai+http://h:1/x#model=m&engine_model=org/m:8b",
                r#"openai http://h:1/x 0 Some("m") Some("org/m:8b")"#,
            ),
            ("http://h:notaport", r#"has the port "notaport", must be in [1, 65535]"#),
            ("http://h:99999", r#"has the port "99999", must be in [1, 65535]"#),
            ("http://h:0", r#"has the port "0", must be in [1, 65535]"#),
            ("http://h:", r#"has the port "", must be in [1, 65535]"#),
            ("http://[::1]:x", r#"has the port "x", must be in [1, 65535]"#),
            ("http://u:p@h:1", "must have no user"),
            ("vllm+http://h:1", r#""vllm" is no kind of engine, must be microserving, mlc or openai"#),
            ("mlc+https://h:1", "must begin with http://"),
            ("https://h", "must begin with http://"),
            ("http://h:1#", r#"the option "" is not NAME=VALUE"#),
            ("mlc+http://h:1#recv_rank", r#"the option "recv_rank" is not NAME=VALUE"#),
            ("mlc+http://h:1#recv_rank=x", r#"recv_rank is "x", must be a whole number from 0"#),
            ("mlc+http://h:1#recv_rank=-1", r#"recv_rank is "-1", must be a whole number from 0"#),
            ("mlc+http://h:1#recv_rank=1&recv_rank=2", "the option recv_rank is given twice"),
            ("mlc+http://h:1#rank=1", r#""rank" is no option, must be recv_rank, model or engine_model"#),
            ("openai+http://h:1#recv_rank=1", "the option recv_rank is not one of openai engines"),
            ("http://h:1#model=m", "the option model is not one of microserving engines"),
            ("openai+http://h:1#model=", "model is empty"),
            (
                "openai+http://h:1#engine_model=m",
                "the option engine_model needs model, the name that clients use",
            ),
        ] {
            assert_eq!(check(text), expected, "{text}");
        }
    }

    #[test]
    fn a_kind_beside_the_address() {
        let with = |text: &str, kind| EngineAddress::with_kind(text, kind).map(|address| address.kind);
        assert_eq!(with("http://h:1", Some(EngineKind::OpenAi)), Ok(EngineKind::OpenAi));
        assert_eq!(with("openai+http://h:1", Some(EngineKind::OpenAi)), Ok(EngineKind::OpenAi));
        assert_eq!(with("openai+http://h:1", None), Ok(EngineKind::OpenAi));
        let error = with("openai+http://h:1", Some(EngineKind::Mlc)).expect_err("contradicts");
        assert_eq!(error.reason, "is not of the kind mlc");
        assert!(with("http://h:1#recv_rank=1", Some(EngineKind::OpenAi)).is_err());
    }
}
