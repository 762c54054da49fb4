//! Messages and service, generated from `microserving.proto`, which describes them.

#![allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    reason = "generated"
)]

tonic::include_proto!("microserving.v1");
