//! The headers of a client's request, as rules and programs may see them.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, header};
use microserving_protocol::ApiError;

/// Whose request it is.
pub(crate) const TENANT: HeaderName = HeaderName::from_static("x-microserving-tenant");

/// The longest tenant's name.
const MAX_TENANT_BYTES: usize = 128;
/// The longest value that is kept.
const MAX_VALUE_BYTES: usize = 1024;
/// All names and values together; what would go beyond is not kept.
const MAX_BYTES: usize = 8 << 10;
/// Nobody's business but the client's and whoever checked them.
const SECRETS: [HeaderName; 4] = [
    header::AUTHORIZATION,
    header::PROXY_AUTHORIZATION,
    header::COOKIE,
    HeaderName::from_static("x-api-key"),
];

/// Says whether a header is never kept.
pub(crate) fn is_secret(name: &HeaderName) -> bool {
    SECRETS.contains(name)
}

/// The headers of one request, without secrets and bounded in size. Clones share them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ClientHeaders(Option<Arc<HeaderMap>>);

impl ClientHeaders {
    /// Keeps `headers`, which usually takes no copy.
    ///
    /// # Errors
    /// 400 if the tenant cannot be read.
    pub(crate) fn keep(mut headers: HeaderMap) -> Result<Self, ApiError> {
        if let Some(tenant) = headers.get(&TENANT) {
            let fits = tenant.len() <= MAX_TENANT_BYTES && tenant.to_str().is_ok();
            if !fits {
                let message = format!("the tenant must be plain text of at most {MAX_TENANT_BYTES} bytes");
                return Err(ApiError::bad_request(TENANT.as_str(), message));
            }
        }
        for name in &SECRETS {
            headers.remove(name);
        }
        let size = |name: &HeaderName, value: &header::HeaderValue| name.as_str().len() + value.len();
        let too_long = headers.values().any(|value| value.len() > MAX_VALUE_BYTES);
        if too_long || headers.iter().map(|(name, value)| size(name, value)).sum::<usize>() > MAX_BYTES {
            let mut left = MAX_BYTES;
            let mut kept = HeaderMap::new();
            // The tenant decides about fairness, so no other header may crowd it out.
            let tenant = headers.iter().filter(|(name, _)| *name == TENANT);
            for (name, value) in tenant.chain(headers.iter().filter(|(name, _)| *name != TENANT)) {
                let bytes = size(name, value);
                if value.len() <= MAX_VALUE_BYTES && bytes <= left {
                    left -= bytes;
                    kept.append(name.clone(), value.clone());
                }
            }
            headers = kept;
        }
        Ok(Self((!headers.is_empty()).then(|| Arc::new(headers))))
    }

    /// Returns a header's first value, if it is text.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.as_ref()?.get(name)?.to_str().ok()
    }

    /// Returns whose request it is; empty if it does not say.
    pub(crate) fn tenant(&self) -> &str {
        self.0.as_ref().and_then(|headers| headers.get(&TENANT)?.to_str().ok()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
        all.iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().expect("a value")))
            .collect()
    }

    #[test]
    fn secrets_are_not_kept() {
        let all = [("authorization", "Bearer x"), ("cookie", "a=b"), ("x-api-key", "k"), ("x-team", "red")];
        let kept = ClientHeaders::keep(headers(&all)).expect("fine");
        assert_eq!((kept.get("x-team"), kept.get("X-Team")), (Some("red"), Some("red")));
        for secret in ["authorization", "cookie", "x-api-key", "nothing"] {
            assert_eq!(kept.get(secret), None, "{secret}");
        }
        assert_eq!(kept.tenant(), "");
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_tenant_always_is() {
        let long = "v".repeat(MAX_VALUE_BYTES + 1);
        let full = "w".repeat(MAX_VALUE_BYTES);
        let names = ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9"];
        let mut all: Vec<_> = names.iter().map(|name| (*name, full.as_str())).collect();
        all.push(("b", &long));
        all.push(("x-microserving-tenant", "acme"));
        let kept = ClientHeaders::keep(headers(&all)).expect("fine");
        assert_eq!(kept.tenant(), "acme");
        assert_eq!(kept.get("b"), None);
        let bytes: usize = names.iter().filter_map(|name| kept.get(name)).map(str::len).sum();
        assert!((MAX_BYTES - 2 * MAX_VALUE_BYTES..=MAX_BYTES).contains(&bytes), "{bytes}");
        assert_eq!(ClientHeaders::keep(HeaderMap::new()).expect("fine"), ClientHeaders::default());
    }

    #[test]
    fn a_tenant_that_nobody_can_read_is_refused() {
        let long = "x".repeat(MAX_TENANT_BYTES + 1);
        let error = ClientHeaders::keep(headers(&[("x-microserving-tenant", &long)])).expect_err("too long");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("x-microserving-tenant")));
    }
}
