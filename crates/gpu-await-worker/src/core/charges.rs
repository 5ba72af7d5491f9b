//! Charges against calls with which processes died, and the events about them.
#![forbid(unsafe_code)]

use std::time::Instant;

use super::Core;
use crate::after::After;
use crate::blame::{Charge, Keys, Standing};
use crate::spec::Spec;

impl Core {
    /// Records charges against calls, and logs what follows.
    pub(super) fn blame(
        &self,
        spec: &Spec,
        charges: Vec<(Keys, Charge)>,
        now: Instant,
        after: &mut After,
    ) {
        let Some(policy) = &spec.options.blame else { return };
        let mut known = self.blamed.lock();
        for (keys, charge) in charges {
            let follows = known.charge(keys, charge, now, policy);
            let service = spec.service;
            let (key, client) = (hex(keys.request), hex(keys.client));
            match follows.request {
                Some(Standing::Watched) => after.log(move || {
                    tracing::info!(
                        service,
                        key,
                        client,
                        "a request is watched: a process died with it"
                    );
                }),
                Some(Standing::Refused) => {
                    let (key, client, refused_for) = (key, client.clone(), policy.refused_for);
                    after.log(move || {
                        tracing::warn!(
                            service,
                            key,
                            client,
                            ?refused_for,
                            "a request is refused: it killed a process"
                        );
                    });
                }
                None => {}
            }
            let client = hex(keys.client);
            match follows.client {
                Some(Standing::Watched) => after.log(move || {
                    tracing::info!(
                        service,
                        client,
                        "a client is watched: two processes died with its requests"
                    );
                }),
                Some(Standing::Refused) => {
                    let refused_for = policy.client_refused_for;
                    after.log(move || {
                        tracing::warn!(
                            service,
                            client,
                            ?refused_for,
                            "a client is refused: its requests killed processes"
                        );
                    });
                }
                None => {}
            }
        }
    }
}

/// The hash of a key, as events show it.
fn hex(key: Option<u64>) -> String {
    key.map_or_else(|| "none".to_owned(), |key| format!("{key:016x}"))
}
