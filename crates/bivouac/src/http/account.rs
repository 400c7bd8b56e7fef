//! The account calls that clients make when no team or project is named: reference/vercel-api.md
//! §1.2. Every team and project exists here: it is made on first use. To a token that ends at some, no other is there.

use axum::Json;
use axum::extract::State;
use bivouac_types::access::Reach;
use bivouac_types::name::{Namespace, check_scope};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::scope::{Call, Seg};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(user))
        .routes(routes!(teams))
        .routes(routes!(team))
        .routes(routes!(project))
        .routes(routes!(create_project))
}

/// Answer with who asks.
#[derive(Debug, Serialize, ToSchema)]
struct UserBody {
    user: User,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct User {
    id: String,
    username: String,
    default_team_id: String,
}

/// A team.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Team {
    id: String,
    slug: String,
    name: String,
    created_at: i64,
    updated_at: i64,
    membership: Membership,
    billing: Billing,
}

#[derive(Debug, Serialize, ToSchema)]
struct Membership {
    role: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
struct Billing {
    plan: &'static str,
}

impl Team {
    fn named(app: &App, name: &str) -> Self {
        let started_at = app.info.started_at;
        Self {
            id: name.to_owned(),
            slug: name.to_owned(),
            name: name.to_owned(),
            created_at: started_at,
            updated_at: started_at,
            membership: Membership { role: "OWNER" },
            // The plan whose limits clients do not narrow further.
            billing: Billing { plan: "enterprise" },
        }
    }
}

/// Answer with a page of teams.
#[derive(Debug, Serialize, ToSchema)]
struct TeamsBody {
    teams: Vec<Team>,
    pagination: TeamPages,
}

#[derive(Debug, Serialize, ToSchema)]
struct TeamPages {
    count: usize,
    /// Always null: there is one page.
    next: Option<i64>,
}

/// A project.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Project {
    id: String,
    name: String,
    account_id: String,
}

#[derive(Debug, Deserialize, ToSchema)]
struct ProjectBody {
    name: String,
}

/// Who asks
#[utoipa::path(get, path = "/v2/user", tag = "account", responses((status = 200, body = UserBody)))]
async fn user(call: Call) -> Json<UserBody> {
    let default_team_id = call.who.grant.home(None).team;
    let name = call.who.name;
    let user = User { id: name.clone(), username: name, default_team_id };
    Json(UserBody { user })
}

/// List teams: those that the token names; with a token for everything the default one, and every other exists too
#[utoipa::path(get, path = "/v2/teams", tag = "account", responses((status = 200, body = TeamsBody)))]
async fn teams(State(app): State<App>, call: Call) -> Json<TeamsBody> {
    let grant = &call.who.grant;
    let mut names = vec![grant.home(None).team];
    for reach in &grant.namespaces {
        match reach {
            Reach::Everything => {}
            Reach::Team(team) | Reach::Project(Namespace { team, .. }) => {
                if !names.contains(team) {
                    names.push(team.clone());
                }
            }
        }
    }
    let teams: Vec<Team> = names.iter().map(|name| Team::named(&app, name)).collect();
    let pagination = TeamPages { count: teams.len(), next: None };
    Json(TeamsBody { teams, pagination })
}

/// Show a team
#[utoipa::path(get, path = "/v2/teams/{team}", tag = "account",
    params(("team" = String, Path, description = "id or slug")),
    responses((status = 200, body = Team)))]
async fn team(
    State(app): State<App>,
    call: Call,
    Seg(team): Seg<String>,
) -> Result<Json<Team>, ApiError> {
    check_scope("team", &team)?;
    let seen = |reach: &Reach| match reach {
        Reach::Everything => true,
        Reach::Team(of) | Reach::Project(Namespace { team: of, .. }) => *of == team,
    };
    if !call.who.grant.namespaces.iter().any(seen) {
        return Err(ApiError::not_found(format!("Team '{team}' was not found.")));
    }
    Ok(Json(Team::named(&app, &team)))
}

/// Show a project
#[utoipa::path(get, path = "/v2/projects/{project}", tag = "account",
    params(("project" = String, Path, description = "id or slug")),
    responses((status = 200, body = Project)))]
async fn project(call: Call, Seg(name): Seg<String>) -> Result<Json<Project>, ApiError> {
    show(&call, name)
}

/// Make a project: it is there already
#[utoipa::path(post, path = "/v11/projects", tag = "account", request_body = ProjectBody,
    responses((status = 200, body = Project)))]
async fn create_project(
    call: Call,
    JsonBody(body): JsonBody<ProjectBody>,
) -> Result<Json<Project>, ApiError> {
    show(&call, body.name)
}

fn show(call: &Call, name: String) -> Result<Json<Project>, ApiError> {
    check_scope("project", &name)?;
    let ns = Namespace { team: call.team()?, project: name };
    if !call.who.grant.sees(&ns) {
        let Namespace { team, project } = ns;
        return Err(ApiError::not_found(format!("Project '{project}' was not found in '{team}'.")));
    }
    Ok(Json(Project { id: ns.project.clone(), name: ns.project, account_id: ns.team }))
}
