-- Argo CD's health of an InferenceService, from its conditions. It says what kstatus says, but for a service that is
-- scaled to 0, for which kstatus has no word.
local function condition(type)
  for _, one in ipairs(obj.status.conditions) do
    if one.type == type then return one end
  end
end

local function health(status, message)
  return { status = status, message = message or "" }
end

if obj.metadata.deletionTimestamp ~= nil then
  return health("Progressing", "it is being deleted")
end
if obj.status == nil or obj.status.conditions == nil then
  return health("Progressing", "waits for the operator")
end
if obj.status.observedGeneration ~= nil and obj.status.observedGeneration ~= obj.metadata.generation then
  return health("Progressing", "the operator has not seen the last edit yet")
end

local ready, reconciling, stalled = condition("Ready"), condition("Reconciling"), condition("Stalled")
-- Both are True where a child cannot be written and a rollout goes on: it moves.
if reconciling ~= nil and reconciling.status == "True" then
  return health("Progressing", reconciling.message)
end
if stalled ~= nil and stalled.status == "True" then
  return health("Degraded", stalled.message)
end
if obj.spec.replicas == 0 then
  return health("Suspended", "spec.replicas is 0")
end
if ready ~= nil and ready.status == "True" then
  return health("Healthy", ready.message)
end
return health("Progressing", ready ~= nil and ready.message or "waits for the operator")
