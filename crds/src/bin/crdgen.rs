//! Writes the CustomResourceDefinitions to the folder given as the first argument (`crds/yaml` unless told).

use std::{fs, path::PathBuf, process::ExitCode};

use gantry_crds::{InferenceService, ModelVersion};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

fn write(folder: &std::path::Path, crd: &CustomResourceDefinition) -> Result<(), Box<dyn std::error::Error>> {
    let name = crd.metadata.name.as_deref().ok_or("a CRD without a name")?;
    let text = format!(
        "# Generated from the types in crds/src by `make generate`: edit those.\n{}",
        serde_yaml::to_string(crd)?
    );
    fs::write(folder.join(format!("{name}.yaml")), text)?;
    Ok(())
}

fn main() -> ExitCode {
    let folder = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("crds/yaml"), PathBuf::from);
    let result = fs::create_dir_all(&folder)
        .map_err(Into::into)
        .and_then(|()| [InferenceService::crd(), ModelVersion::crd()].iter().try_for_each(|crd| write(&folder, crd)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[allow(clippy::print_stderr)]
            {
                eprintln!("error: the CRDs could not be written to {}: {error}", folder.display());
            }
            ExitCode::FAILURE
        }
    }
}
