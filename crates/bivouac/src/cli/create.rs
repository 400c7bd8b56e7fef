//! `bivouac create`: a named sandbox.

use serde_json::json;

use super::args::{Create, Global};
use super::busy::working;
use super::client::{Client, random_word};
use super::failure::{ExitStatus, Outcome};
use super::parse::millis;
use super::{image, life, output, sandbox};

/// Creates it and prints its name, so that `NAME=$(bivouac create)` works.
pub(crate) async fn run(global: &Global, args: Create) -> Outcome {
    let client = Client::find(global)?;
    let options = &args.sandbox;
    image::pull::before_create(&client, options.image.as_deref(), &options.registry).await?;
    let mut body = sandbox::new_body(&client, &args.sandbox)?;
    if let Some(name) = &args.name {
        body.insert("name".to_owned(), name.as_str().into());
    }
    if let Some(timeout) = args.timeout {
        body.insert("timeout".to_owned(), millis(timeout).into());
    }
    let life = life::body(&args.life);
    if !life.is_empty() {
        body.insert("life".to_owned(), life.into());
    }
    body.insert("persistent".to_owned(), (!args.ephemeral).into());
    body.insert("env".to_owned(), json!(sandbox::environment(&args.env)?));
    let key = random_word()?;
    let path = sandbox::create_path(&args.sandbox);
    let (query, body) = (client.scope(), body.into());
    let made = async { Ok(client.post_once(path, &query, &body, &key).await?) };
    let answer = working(global, &doing(&args), made).await?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    let name = sandbox::text(&answer, "/sandbox/name")?;
    output::line(&name)?;
    output::hint(&format!("bivouac exec {name} -- CMD; bivouac inspect {name}; bivouac rm {name}"));
    Ok(ExitStatus::Success)
}

/// What a create spends its time with.
fn doing(args: &Create) -> String {
    let name = args.name.as_deref().unwrap_or("a sandbox");
    let from = &args.sandbox;
    if let Some(url) = &from.git {
        return format!("starting {name}, cloning {url}");
    }
    if let Some(url) = &from.tarball {
        return format!("starting {name}, unpacking {url}");
    }
    match &from.snapshot {
        Some(snapshot) => format!("starting {name} from {snapshot}"),
        None => format!("starting {name}"),
    }
}
