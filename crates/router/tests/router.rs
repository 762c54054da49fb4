//! The router over scripted engines.

#[path = "router/fake.rs"]
mod fake;
#[path = "router/servers.rs"]
mod servers;

#[path = "router/admission.rs"]
mod admission;
#[path = "router/answers.rs"]
mod answers;
#[path = "router/cancel.rs"]
mod cancel;
#[path = "router/control.rs"]
mod control;
#[path = "router/failures.rs"]
mod failures;
#[path = "router/foreign.rs"]
mod foreign;
#[path = "router/headers.rs"]
mod headers;
#[path = "router/health.rs"]
mod health;
#[path = "router/lines.rs"]
mod lines;
#[path = "router/membership.rs"]
mod membership;
#[path = "router/patterns.rs"]
mod patterns;
#[path = "router/placing.rs"]
mod placing;
#[path = "router/relay.rs"]
mod relay;
#[path = "router/resuming.rs"]
mod resuming;
