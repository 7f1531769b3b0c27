//! Server URLs in configuration files.

use candle_grpo_core::validate::{Checked, check};

/// Checks that the option `field` is a server URL.
///
/// # Errors
///
/// If it does not begin with `http://` or `https://` and a host.
pub fn check_server_url(field: &str, url: &str) -> Checked {
    let known = ["http://", "https://"].iter().any(|scheme| {
        let host = url.strip_prefix(scheme);
        host.is_some_and(|host| !host.is_empty() && !host.starts_with('/'))
    });
    let must = "begin with http:// or https://";
    check(known, field, format_args!("{url:?}"), must)
}
