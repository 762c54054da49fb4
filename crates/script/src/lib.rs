//! Orchestration programs as scripts, loaded, checked, dry-run, swapped and rolled back while the router serves.
//!
//! - [`ScriptLoader`] turns source text into programs: it is the router's `ProgramLoader`.
//! - [`ScriptFactory`] is one checked script, and makes a [`ScriptProgram`] for any values of its parameters.
//! - [`Limits`] says what a run may use.
//! - [`Trace`] and [`dry_run`] run a script over engines that only say that they computed.
//!
//! ```text
//! let d = ctx.decoder();
//! let p = ctx.prefiller(d);
//! if p == () || req.len < 512 { return d.start_generate(0); }
//! let end = req.len - 1;
//! let r = d.prep_recv(end);
//! if r.matched < end { p.remote_send(r, r.matched, end); }
//! d.start_generate(end)
//! ```
//!
//! # A script waits on a thread of its own
//!
//! The interpreter is synchronous, the calls to engines are not. Two ways lead out: to end the script at each call and run it again from its
//! beginning with the answers so far, or to let it wait. Running it again needs every other answer (loads, health, hints) to be
//! recorded too, or the second run takes another way than the first. So a script waits, on one of a bounded number of threads,
//! while the request's own task makes the call. That task owns every seat; when it is dropped the seats go at once, and the script ends at
//! its next operation. A script can leak nothing because it owns nothing.

#![forbid(unsafe_code)]

mod api;
mod check;
mod dry_run;
mod fault;
mod handles;
mod language;
mod limits;
mod loader;
mod pool;
mod program;
mod run;

pub use dry_run::{Trace, run as dry_run};
pub use limits::Limits;
pub use loader::ScriptLoader;
pub use program::{ScriptFactory, ScriptProgram};
