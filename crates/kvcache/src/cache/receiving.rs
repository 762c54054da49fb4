//! What receivers do: reserve, and one of three ends.

use microserving_protocol::{Generation, KvRange, TokenId};

use super::KvCache;
use crate::handle::Promise;
use crate::table::num_tokens;
use crate::{KvError, PageTable, Reservation};

impl KvCache {
    /// Promises pages to a transfer: finds what is cached of `tokens`, holds it, and reserves pages for the rest and for
    /// `extra_tokens` more, under a new generation.
    ///
    /// `tokens` is the prompt up to the `end` of the range to be received.
    ///
    /// # Errors
    /// [`KvError::NoRoom`]; [`KvError::QuarantineFull`]; [`KvError::OutOfRange`] if tokens and room together are more than a
    /// `u32` counts.
    pub fn reserve(
        &mut self,
        salt: &str,
        tokens: &[TokenId],
        extra_tokens: u32,
    ) -> Result<Reservation, KvError> {
        self.collect();
        let all = tokens.len() as u64 + u64::from(extra_tokens);
        let out_of_range =
            || KvError::OutOfRange { field: "extra_tokens", value: all, min: 0, max: u32::MAX.into() };
        let capacity = u32::try_from(all).map_err(|_| out_of_range())?;
        let end = capacity - extra_tokens;
        let (quarantined, limit) = (self.counts().quarantined, self.config.max_quarantined_pages);
        if quarantined > limit {
            return Err(KvError::QuarantineFull { quarantined, limit });
        }
        let mut holding = self.match_prefix(salt, tokens).holding;
        let matched = num_tokens(holding.num_shared, self.config.page_size);
        let num_pages = self.pages_for(capacity) - self.pages_for(matched);
        if let Err(no_room) = self.make_room(num_pages) {
            drop(holding);
            self.collect();
            return Err(no_room);
        }
        let range = KvRange::new(matched, end).expect("a match is no longer than the tokens");
        let generation = Generation(self.next_generation);
        self.next_generation += 1;
        for _ in 0..num_pages {
            holding.pages.push(self.pool.promise(generation).expect("room was made"));
        }
        let num_exposed = self.pages_for(range.num_tokens()) as usize;
        holding.promise = Some(Promise { generation, num_exposed });
        self.stats.reservations += 1;
        Ok(Reservation { holding, generation, range, page_size: self.config.page_size })
    }

    /// Turns a reservation into a table, whose KV is valid up to what has arrived.
    ///
    /// Call it only when no write under its generation can land any more: the whole range has arrived, or the transport
    /// has released the grant and the range is going to be computed here.
    ///
    /// # Errors
    /// [`KvError::ForeignHandle`]; the reservation is quarantined where it belongs then.
    pub fn accept(&mut self, reservation: Reservation) -> Result<PageTable, KvError> {
        self.check_ours(&reservation.holding)?;
        self.collect();
        let Reservation { mut holding, generation, page_size, .. } = reservation;
        for page in &holding.pages[holding.num_shared..] {
            self.pool
                .accept(*page, generation)
                .expect("a reservation's pages are reserved under its generation");
        }
        holding.promise = None;
        Ok(PageTable { holding, page_size })
    }

    /// Gives a reservation up while a peer may still write: returns the pages that wait for [`KvCache::drained`].
    ///
    /// The matched context is released and pages that no peer knows of become free at once. With 0 pages left to wait for,
    /// the generation is over.
    pub fn quarantine(&mut self, reservation: Reservation) -> u32 {
        let waiting = reservation.receiving_pages().len();
        drop(reservation);
        self.collect();
        u32::try_from(waiting).unwrap_or(u32::MAX)
    }

    /// Frees the pages of a quarantined generation, because no write under it can land any more; returns their number.
    ///
    /// # Errors
    /// [`KvError::NotQuarantined`] if none wait under this generation, or they have been drained already.
    pub fn drained(&mut self, generation: Generation) -> Result<u32, KvError> {
        self.collect();
        let pages = self.quarantined.remove(&generation).ok_or(KvError::NotQuarantined { generation })?;
        for page in &pages {
            self.pool
                .drain(*page, generation)
                .expect("pages listed under a generation are quarantined under it");
        }
        Ok(u32::try_from(pages.len()).unwrap_or(u32::MAX))
    }

    /// Gives a reservation up and frees its pages at once.
    ///
    /// Only when its address was never handed out, or no write under it can land any more.
    ///
    /// # Errors
    /// [`KvError::ForeignHandle`]; the reservation is quarantined where it belongs then.
    pub fn cancel(&mut self, reservation: Reservation) -> Result<(), KvError> {
        self.check_ours(&reservation.holding)?;
        let mut holding = reservation.holding;
        for page in holding.pages.drain(holding.num_shared..) {
            let generation = reservation.generation;
            self.pool
                .cancel(page, generation)
                .expect("a reservation's pages are reserved under its generation");
        }
        holding.promise = None;
        drop(holding);
        self.collect();
        Ok(())
    }

    /// Returns the generations whose pages wait for a peer's last write.
    pub fn quarantined_generations(&self) -> impl Iterator<Item = Generation> {
        self.quarantined.keys().copied()
    }
}
