//! Writes what is made of results beside them: the table and the plots.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use crate::{
    plot,
    results::Results,
    table::{self, has_gaps, itl_file},
};

/// Writes all files to `folder`.
///
/// # Errors
/// When one cannot be written.
pub fn write(results: &Results, folder: &Path) -> Result<()> {
    results.write(folder)?;
    let file = |name: &str, text: String| {
        fs::write(folder.join(name), text).with_context(|| folder.join(name).display().to_string())
    };
    file(table::FILE, table::render(results))?;
    file(plot::RATIOS_FILE, plot::ratios(results))?;
    for load in results.loads.iter().filter(|load| has_gaps(load)) {
        file(&itl_file(load), plot::times_between_tokens(load))?;
    }
    Ok(())
}
