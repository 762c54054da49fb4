//! Prefill–decode disaggregation with part of the prefill moved to the decoding engine.

use std::sync::Arc;

use async_trait::async_trait;

use crate::{BadPattern, Ctx, Error, Parameter, Parameters, Program, ProgramFactory, Request, TokenStream};

/// What part of a prompt is left to the decoding engine if nobody says.
const DEFAULT_RATIO: f64 = 0.1;

/// As [`crate::PrefillDecode`], but the decoding engine computes the last part of the prompt, so that long prompts do not leave it idle.
///
/// ```text
/// prompt  0 ─────── matched ──────── decode_start ─────── len
///           on D      P sends it       D computes it
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Balanced {
    ratio: f64,
}

impl Balanced {
    /// Makes the pattern that leaves `ratio` of each prompt to the decoding engine; nothing if it is not in `[0, 1]`.
    #[must_use]
    pub fn new(ratio: f64) -> Option<Self> {
        (0.0..=1.0).contains(&ratio).then_some(Self { ratio })
    }

    /// Returns where the decoding engine takes over: `int((1 - ratio) * len)`, and at most `len - 1`, since it needs the last logits.
    #[must_use]
    pub fn decode_start(&self, len: u32) -> u32 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and len")]
        let start = ((1.0 - self.ratio) * f64::from(len)) as u32;
        start.min(len.saturating_sub(1))
    }
}

#[async_trait]
impl Program for Balanced {
    fn name(&self) -> &str {
        "balanced"
    }

    fn passes_on(&self) -> bool {
        true
    }

    async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error> {
        let mut d = ctx.decoder(request)?;
        let Some(mut p) = ctx.prefiller(request, &d) else {
            return d.start_generate(request, 0).await;
        };
        let decode_start = self.decode_start(request.len());
        let prepared = d.prep_recv(request, decode_start).await?;
        if prepared.matched < decode_start {
            p.remote_send(request, &prepared, prepared.matched, decode_start).await?;
        }
        drop(p);
        d.start_generate(request, decode_start).await
    }
}

/// Makes [`Balanced`] programs: `balanced:0.25`.
#[derive(Clone, Copy, Debug, Default)]
pub struct BalancedFactory;

impl ProgramFactory for BalancedFactory {
    fn name(&self) -> &str {
        "balanced"
    }

    fn parameters(&self) -> &[Parameter] {
        static PARAMETERS: [Parameter; 1] = [Parameter::number(
            "ratio",
            DEFAULT_RATIO,
            0.0,
            1.0,
            "The part of the prompt that is left to the decoding engine.",
        )];
        &PARAMETERS
    }

    fn about(&self) -> &str {
        "One engine prefills, another decodes and prefills the last part of the prompt itself."
    }

    fn build(&self, parameters: &Parameters) -> Result<Arc<dyn Program>, BadPattern> {
        let ratio = parameters.number("ratio")?;
        match Balanced::new(ratio) {
            Some(program) => Ok(Arc::new(program)),
            None => Err(BadPattern::parameter("balanced", "ratio", format!("has the ratio {ratio}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_decoding_engine_takes_over_where_the_ratio_says() {
        for (ratio, len, expected) in [
            (0.1, 1000, 900),
            (0.25, 1000, 750),
            (0.5, 1000, 500),
            (0.1, 10, 9),
            (0.1, 15, 13),
            (0.25, 17, 12),
            (0.5, 1, 0),
            (0.1, 1, 0),
            (0.5, 2, 1),
            (0.0, 7, 6),
            (0.0, 1, 0),
            (1.0, 7, 0),
            // As Python's floats have it: (1 - 0.9) * 10 is 0.9999999999999998.
            (0.9, 10, 0),
            (0.5, u32::MAX, 2_147_483_647),
        ] {
            let program = Balanced::new(ratio).expect("in range");
            assert_eq!(program.decode_start(len), expected, "{ratio} of {len}");
        }
        for ratio in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert!(Balanced::new(ratio).is_none(), "{ratio}");
        }
    }
}
