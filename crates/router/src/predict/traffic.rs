//! How often requests come.

use std::sync::{Arc, Mutex, PoisonError};

use microserving_cost::{ArrivalRate, Profile};
use tokio::time::Instant;

/// The arrivals at this router, and the profile for engines that bring none.
#[derive(Debug)]
pub(crate) struct Traffic {
    origin: Instant,
    arrivals: Mutex<ArrivalRate>,
    fallback: Option<Arc<Profile>>,
}

impl Traffic {
    /// Begins to count now.
    pub(crate) fn new(fallback: Option<Arc<Profile>>) -> Self {
        Self { origin: Instant::now(), arrivals: Mutex::default(), fallback }
    }

    /// Takes an arrival.
    pub(crate) fn arrive(&self) {
        let now = self.origin.elapsed();
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).arrive(now);
    }

    /// Returns arrivals a second, where serving one takes so long.
    pub(crate) fn per_second(&self, service_seconds: f64) -> f64 {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).per_second(service_seconds)
    }

    /// Returns the profile for engines that bring none.
    pub(crate) fn fallback(&self) -> Option<&Arc<Profile>> {
        self.fallback.as_ref()
    }
}
