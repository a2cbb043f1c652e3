// What the API server's own code says of the chart's admission policy and of the CRDs, without a cluster: the expressions
// compile, cost less than they may with as many replicas as there can be, and decide as they should.
package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	v1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	schemacel "k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"sigs.k8s.io/yaml"
)

const chart = "../../../charts/gantry"

// Most replicas of a service, and of entries in its status: those of pods that are gone stay for a while.
const replicas = 512

func policy(t *testing.T) *v1.ValidatingAdmissionPolicy {
	t.Helper()
	loaded, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	release := chartutil.ReleaseOptions{Name: "gantry", Namespace: "gantry-system"}
	values, err := chartutil.ToRenderValues(loaded, map[string]any{}, release, chartutil.DefaultCapabilities)
	if err != nil {
		t.Fatal(err)
	}
	rendered, err := engine.Render(loaded, values)
	if err != nil {
		t.Fatal(err)
	}
	documents := strings.Split(rendered["gantry/templates/agent-policy.yaml"], "\n---\n")
	if len(documents) != 2 {
		t.Fatalf("a policy and its binding are expected, there are %d documents", len(documents))
	}
	policy, binding := &v1.ValidatingAdmissionPolicy{}, &v1.ValidatingAdmissionPolicyBinding{}
	for i, into := range []any{policy, binding} {
		if err := yaml.UnmarshalStrict([]byte(documents[i]), into); err != nil {
			t.Fatal(err)
		}
	}
	if binding.Spec.PolicyName != policy.Name || len(binding.Spec.ValidationActions) != 1 || binding.Spec.ValidationActions[0] != v1.Deny {
		t.Fatalf("the binding does not enforce the policy: %+v", binding.Spec)
	}
	return policy
}

// The policy, compiled as the API server of a release compiles it.
type compiled struct {
	matches     cel.ConditionEvaluator
	validations cel.ConditionEvaluator
	env         *cel.CompositionEnv
	policy      *v1.ValidatingAdmissionPolicy
}

func compile(t *testing.T, policy *v1.ValidatingAdmissionPolicy, release *version.Version) compiled {
	t.Helper()
	compiler, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(release, true))
	if err != nil {
		t.Fatal(err)
	}
	options := cel.OptionalVariableDeclarations{HasAuthorizer: true, StrictCost: true}
	for _, variable := range policy.Spec.Variables {
		accessor := &validating.Variable{Name: variable.Name, Expression: variable.Expression}
		if result := compiler.CompileAndStoreVariable(accessor, options, environment.NewExpressions); result.Error != nil {
			t.Fatalf("variable %s: %v", variable.Name, result.Error)
		}
	}
	var matches, validations []cel.ExpressionAccessor
	for i := range policy.Spec.MatchConditions {
		matches = append(matches, (*matchconditions.MatchCondition)(&policy.Spec.MatchConditions[i]))
	}
	for _, one := range policy.Spec.Validations {
		validations = append(validations, &validating.ValidationCondition{Expression: one.Expression, Message: one.Message})
	}
	result := compiled{
		matches:     compiler.CompileCondition(matches, options, environment.NewExpressions),
		validations: compiler.CompileCondition(validations, options, environment.NewExpressions),
		env:         compiler.CompositionEnv,
		policy:      policy,
	}
	for _, evaluator := range []cel.ConditionEvaluator{result.matches, result.validations} {
		if errors := evaluator.CompilationErrors(); len(errors) > 0 {
			t.Fatalf("%v", errors)
		}
	}
	return result
}

// Who writes.
type writer struct {
	user, pod, manager string
}

var agent = writer{"system:serviceaccount:ns:chat-gantry", "chat-0", "gantry-agent-chat-0"}

// Whether the policy is about this write, what it has against it, and what the decision cost.
func (c compiled) judge(t *testing.T, by writer, before, after *unstructured.Unstructured) (bool, []string, int64) {
	t.Helper()
	info := &user.DefaultInfo{Name: by.user}
	if by.pod != "" {
		info.Extra = map[string][]string{"authentication.kubernetes.io/pod-name": {by.pod}}
	}
	gvk := schema.GroupVersionKind{Group: "gantry.dev", Version: "v1alpha1", Kind: "InferenceService"}
	gvr := schema.GroupVersionResource{Group: "gantry.dev", Version: "v1alpha1", Resource: "inferenceservices"}
	options := &metav1.PatchOptions{FieldManager: by.manager}
	attributes := admission.NewAttributesRecord(after, before, gvk, "ns", "chat", gvr, "status", admission.Update, options, false, info)
	versioned := &admission.VersionedAttributes{Attributes: attributes, VersionedKind: gvk, VersionedObject: after, VersionedOldObject: before}
	request := cel.CreateAdmissionRequest(attributes, metav1.GroupVersionResource(gvr), metav1.GroupVersionKind(gvk))
	ctx := c.env.CreateContext(context.Background())
	none := cel.OptionalVariableBindings{}
	matched, _, err := c.matches.ForInput(ctx, versioned, request, none, nil, celconfig.RuntimeCELCostBudgetMatchConditions)
	if err != nil {
		t.Fatal(err)
	}
	for _, result := range matched {
		if result.Error != nil {
			t.Fatal(result.Error)
		}
		if result.EvalResult.Value() != true {
			return false, nil, 0
		}
	}
	results, left, err := c.validations.ForInput(ctx, versioned, request, none, nil, celconfig.RuntimeCELCostBudget)
	if err != nil {
		t.Fatal(err)
	}
	var against []string
	for i, result := range results {
		if result.Error != nil {
			t.Fatalf("%s: %v", c.policy.Spec.Validations[i].Expression, result.Error)
		}
		if result.EvalResult.Value() != true {
			against = append(against, c.policy.Spec.Validations[i].Message)
		}
	}
	return true, against, celconfig.RuntimeCELCostBudget - left
}

func entry(pod string) map[string]any {
	text := fmt.Sprintf(`{"pod": %q, "version": "chat-5f9c01ab23", "attempt": 3, "health": "Healthy", "resident": "chat-5f9c01ab23",
		"memory": {"predictedBytes": 17931591024, "measuredBytes": 17931591024, "limitBytes": 25769803776},
		"degradation": "Normal",
		"candidate": {"version": "chat-8d21", "phase": "Validating", "gates": [{"name": "Fetch", "verdict": "Pass", "value": "4 Gi in 12.1 s"}]},
		"reportedAt": "2026-01-01T00:00:00Z"}`, pod)
	var entry map[string]any
	if err := json.Unmarshal([]byte(text), &entry); err != nil {
		panic(err)
	}
	return entry
}

func name(pod int) string {
	return fmt.Sprintf("chat-%d", pod)
}

// A service with so many pods, as it is in the API server: numbers are int64 and float64.
func service(pods int) *unstructured.Unstructured {
	var entries []any
	for pod := range pods {
		entries = append(entries, entry(name(pod)))
	}
	object := map[string]any{
		"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
		"metadata": map[string]any{"name": "chat", "namespace": "ns", "managedFields": []any{managed(agent.manager, "Apply", `{"f:status": {"f:replicas": {"k:{\"pod\":\"chat-0\"}": {".": {}, "f:pod": {}}}}}`)}},
		"spec":     map[string]any{"replicas": pods},
		"status": map[string]any{
			"activeVersion": "chat-5f9c01ab23", "attempts": 3, "replicaCount": pods, "replicas": entries,
			"conditions": []any{map[string]any{"type": "Ready", "status": "True"}},
		},
	}
	text, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	service := &unstructured.Unstructured{}
	if err := service.UnmarshalJSON(text); err != nil {
		panic(err)
	}
	return service
}

func managed(manager, operation, fields string) map[string]any {
	var parsed map[string]any
	if err := json.Unmarshal([]byte(fields), &parsed); err != nil {
		panic(err)
	}
	return map[string]any{"manager": manager, "operation": operation, "subresource": "status", "fieldsV1": parsed}
}

func status(object *unstructured.Unstructured) map[string]any {
	return object.Object["status"].(map[string]any)
}

func entries(object *unstructured.Unstructured) []any {
	entries, _ := status(object)["replicas"].([]any)
	return entries
}

func own(fields string) func(*unstructured.Unstructured) {
	return func(object *unstructured.Unstructured) {
		list := object.Object["metadata"].(map[string]any)["managedFields"].([]any)
		list[0] = managed(agent.manager, "Apply", fields)
	}
}

func TestAnAgentMayChangeItsOwnEntryAndNothingElse(t *testing.T) {
	set := func(field string, value any) func(*unstructured.Unstructured) {
		return func(object *unstructured.Unstructured) { status(object)[field] = value }
	}
	inEntry := func(pod int, field string, value any) func(*unstructured.Unstructured) {
		return func(object *unstructured.Unstructured) { entries(object)[pod].(map[string]any)[field] = value }
	}
	another := agent
	another.manager = "gantry-operator"
	unbound := agent
	unbound.pod = ""
	for _, one := range []struct {
		what    string
		by      writer
		change  func(*unstructured.Unstructured)
		against string
	}{
		{"nothing", agent, func(*unstructured.Unstructured) {}, ""},
		{"its own entry", agent, inEntry(0, "version", "chat-8d21"), ""},
		{"its own entry, new figures", agent, inEntry(0, "memory", map[string]any{"measuredBytes": int64(4)}), ""},
		{"its own entry, removed", agent, func(object *unstructured.Unstructured) { set("replicas", entries(object)[1:])(object) }, ""},
		{"its own entry, elsewhere in the list", agent, func(object *unstructured.Unstructured) {
			list := entries(object)
			set("replicas", append(append([]any{}, list[1:]...), list[0]))(object)
		}, ""},
		{"another's entry", agent, inEntry(1, "health", "Failed"), "not that of another pod"},
		{"a figure in another's entry", agent, inEntry(2, "memory", map[string]any{"measuredBytes": int64(4)}), "not that of another pod"},
		{"another's entry, removed", agent, func(object *unstructured.Unstructured) { set("replicas", entries(object)[:2])(object) }, "not that of another pod"},
		{"an entry of a pod that is not there", agent, func(object *unstructured.Unstructured) {
			set("replicas", append(entries(object), entry("chat-9")))(object)
		}, "not that of another pod"},
		{"all entries, removed", agent, func(object *unstructured.Unstructured) { delete(status(object), "replicas") }, "not that of another pod"},
		{"the active version", agent, set("activeVersion", "chat-evil"), "no other field"},
		{"the active version, removed", agent, func(object *unstructured.Unstructured) { delete(status(object), "activeVersion") }, "no other field"},
		{"a candidate", agent, set("candidateVersion", "chat-evil"), "no other field"},
		{"a condition", agent, set("conditions", []any{map[string]any{"type": "Ready", "status": "False"}}), "no other field"},
		{"a count", agent, set("replicaCount", int64(0)), "no other field"},
		{"the whole status, removed", agent, func(object *unstructured.Unstructured) { delete(object.Object, "status") }, "no other field"},
		{"its own entry, as another manager", another, inEntry(0, "version", "chat-8d21"), "gantry-agent-POD"},
		{"its own entry, with a token of no pod", unbound, inEntry(0, "version", "chat-8d21"), "names none"},
		{"who owns the active version", agent, own(`{"f:status": {"f:activeVersion": {}, "f:replicas": {"k:{\"pod\":\"chat-0\"}": {}}}}`), "no other field"},
		{"who owns another's entry", agent, own(`{"f:status": {"f:replicas": {"k:{\"pod\":\"chat-0\"}": {}, "k:{\"pod\":\"chat-1\"}": {}}}}`), "no other field"},
		{"who owns a label", agent, own(`{"f:metadata": {"f:labels": {}}}`), "no other field"},
		{"who owns nothing", agent, own(`{}`), ""},
	} {
		for _, release := range []*version.Version{version.MajorMinor(1, 30), environment.DefaultCompatibilityVersion()} {
			before, after := service(3), service(3)
			one.change(after)
			matched, against, _ := compile(t, policy(t), release).judge(t, one.by, before, after)
			if !matched {
				t.Errorf("%s: the policy is not about it", one.what)
			}
			told := strings.Join(against, "; ")
			if (one.against == "") != (told == "") || !strings.Contains(told, one.against) {
				t.Errorf("%s: %q is expected, it says %q", one.what, one.against, told)
			}
		}
	}
}

func TestTheFirstEntryOfAServiceWithoutAStatusIsTaken(t *testing.T) {
	before, after := service(1), service(1)
	delete(before.Object, "status")
	delete(before.Object["metadata"].(map[string]any), "managedFields")
	// What the API server puts in besides.
	after.Object["status"] = map[string]any{"replicas": entries(after), "attempts": int64(0), "replicaCount": int64(0), "readyReplicas": int64(0)}
	if _, against, _ := compile(t, policy(t), environment.DefaultCompatibilityVersion()).judge(t, agent, before, after); len(against) > 0 {
		t.Error(against)
	}
}

// The account of a service's pods may be any of its namespace, and older pods may have another than the spec names by now.
func TestThePolicyHoldsForAnyAccountOfTheNamespace(t *testing.T) {
	compiled := compile(t, policy(t), environment.DefaultCompatibilityVersion())
	for _, account := range []string{"mine", "chat-gantry", "other-gantry", "default"} {
		before, own, others := service(2), service(2), service(2)
		entries(own)[0].(map[string]any)["version"] = "chat-8d21"
		status(others)["activeVersion"] = "chat-evil"
		by := agent
		by.user = "system:serviceaccount:ns:" + account
		if matched, against, _ := compiled.judge(t, by, before, own); !matched || len(against) > 0 {
			t.Errorf("%s, its own entry: %v %v", account, matched, against)
		}
		if matched, against, _ := compiled.judge(t, by, before, others); !matched || len(against) == 0 {
			t.Errorf("%s, the active version: %v %v", account, matched, against)
		}
	}
}

func TestThePolicyIsAboutAgentsOnly(t *testing.T) {
	for _, name := range []string{"system:serviceaccount:gantry-system:gantry-operator", "system:serviceaccount:other:chat-gantry", "system:serviceaccount:ns2:mine", "system:node:ns", "admin"} {
		before, after := service(2), service(2)
		status(after)["activeVersion"] = "chat-8d21"
		by := writer{name, "", "somebody"}
		if matched, _, _ := compile(t, policy(t), environment.DefaultCompatibilityVersion()).judge(t, by, before, after); matched {
			t.Errorf("the policy is about %s", name)
		}
	}
}

func TestAFullServiceCostsLessThanItMay(t *testing.T) {
	before, after := service(replicas), service(replicas)
	entries(after)[0].(map[string]any)["version"] = "chat-8d21"
	_, against, cost := compile(t, policy(t), environment.DefaultCompatibilityVersion()).judge(t, agent, before, after)
	t.Logf("%d entries cost %d of %d, and one expression may cost %d", replicas, cost, celconfig.RuntimeCELCostBudget, celconfig.PerCallLimit)
	if len(against) > 0 || cost > celconfig.PerCallLimit/4 {
		t.Errorf("%v, cost %d", against, cost)
	}
}

// What a server-side apply makes of an object of the CRD, its managed fields included.
func applier(t *testing.T) func(live *unstructured.Unstructured, by, status string) *unstructured.Unstructured {
	t.Helper()
	crd := customResource(t, chart+"/files/crds/inferenceservices.gantry.dev.yaml")
	built, err := builder.BuildOpenAPIV3(crd, "v1alpha1", builder.Options{})
	if err != nil {
		t.Fatal(err)
	}
	schemas := built.Components.Schemas
	withMetadata(schemas)
	converter, err := managedfields.NewTypeConverter(schemas, false)
	if err != nil {
		t.Fatal(err)
	}
	gvk := schema.GroupVersionKind{Group: "gantry.dev", Version: "v1alpha1", Kind: "InferenceService"}
	scheme := runtime.NewScheme()
	scheme.AddKnownTypeWithName(gvk, &unstructured.Unstructured{})
	manager, err := managedfields.NewDefaultCRDFieldManager(converter, unconverted{}, scheme, scheme, gvk, gvk.GroupVersion(), "status", nil)
	if err != nil {
		t.Fatal(err)
	}
	return func(live *unstructured.Unstructured, by, status string) *unstructured.Unstructured {
		applied := &unstructured.Unstructured{}
		text := fmt.Sprintf(`{"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "chat", "namespace": "ns"}, "status": %s}`, status)
		if err := applied.UnmarshalJSON([]byte(text)); err != nil {
			t.Fatal(err)
		}
		result, err := manager.Apply(live, applied, by, true)
		if err != nil {
			t.Fatal(err)
		}
		return result.(*unstructured.Unstructured)
	}
}

// All versions of an object are one here.
type unconverted struct{}

func (unconverted) Convert(in, out, context any) error { return fmt.Errorf("nothing is converted") }
func (unconverted) ConvertToVersion(in runtime.Object, _ runtime.GroupVersioner) (runtime.Object, error) {
	return in, nil
}
func (unconverted) ConvertFieldLabel(_ schema.GroupVersionKind, label, value string) (string, string, error) {
	return label, value, nil
}

// Adds what the API server has of its own to the schemas of a CRD.
func withMetadata(schemas map[string]*spec.Schema) {
	friendly := func(name string) string {
		return "io.k8s." + strings.ReplaceAll(strings.TrimPrefix(name, "k8s.io/"), "/", ".")
	}
	definitions := openapi.GetOpenAPIDefinitions(func(name string) spec.Ref {
		return spec.MustCreateRef("#/components/schemas/" + friendly(name))
	})
	for name, definition := range definitions {
		if strings.Contains(name, "apis/meta/v1") {
			converted := definition.Schema
			schemas[friendly(name)] = &converted
		}
	}
}

func TestAnAgentsServerSideApplyIsTakenAndMoreIsNot(t *testing.T) {
	apply, policy := applier(t), compile(t, policy(t), environment.DefaultCompatibilityVersion())
	text := func(entries ...map[string]any) string {
		text, err := json.Marshal(map[string]any{"replicas": entries})
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	another := agent
	another.pod, another.manager = "chat-1", "gantry-agent-chat-1"
	fresh := service(0)
	delete(fresh.Object, "status")
	delete(fresh.Object["metadata"].(map[string]any), "managedFields")
	operators := apply(fresh, "gantry-operator", `{"activeVersion": "chat-5f9c01ab23", "attempts": 3}`)
	first := apply(operators, agent.manager, text(entry("chat-0")))
	both := apply(first, another.manager, text(entry("chat-1")))
	changed := entry("chat-0")
	changed["version"] = "chat-8d21"
	for _, one := range []struct {
		what          string
		by            writer
		before, after *unstructured.Unstructured
		against       string
	}{
		{"the first entry", agent, operators, first, ""},
		{"the second entry", another, first, both, ""},
		{"the entry again", agent, both, apply(both, agent.manager, text(changed)), ""},
		{"no entry any more", agent, both, apply(both, agent.manager, `{}`), ""},
		{"another's entry as well", agent, both, apply(both, agent.manager, text(changed, entry("chat-1"))), "own its entry"},
		{"the active version as well", agent, both, apply(both, agent.manager, `{"activeVersion": "chat-5f9c01ab23"}`), "own its entry"},
	} {
		matched, against, _ := policy.judge(t, one.by, one.before, one.after)
		told := strings.Join(against, "; ")
		if !matched || (one.against == "") != (told == "") || !strings.Contains(told, one.against) {
			fields, _ := json.Marshal(one.after.Object["metadata"])
			t.Errorf("%s: %q is expected, it says %q: %s", one.what, one.against, told, fields)
		}
	}
}

// Structural schemas, rules that compile, and rules that cost no more than an API server allows.
func TestTheCRDsAreTakenByTheAPIServer(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{apiextensions.AddToScheme, apiextensionsv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(chart + "/files/crds/*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("%v %v", files, err)
	}
	for _, file := range files {
		crd := &apiextensions.CustomResourceDefinition{}
		if err := scheme.Convert(customResource(t, file), crd, nil); err != nil {
			t.Fatal(err)
		}
		crd.Status.StoredVersions = []string{"v1alpha1"}
		for _, problem := range validation.ValidateCustomResourceDefinition(context.Background(), crd) {
			t.Errorf("%s: %v", file, problem)
		}
	}
}

func structuralSchema(t *testing.T) *structuralschema.Structural {
	t.Helper()
	crd, internal := customResource(t, chart+"/files/crds/inferenceservices.gantry.dev.yaml"), &apiextensions.JSONSchemaProps{}
	written := crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(written, internal, nil); err != nil {
		t.Fatal(err)
	}
	structural, err := structuralschema.NewStructural(internal)
	if err != nil {
		t.Fatal(err)
	}
	return structural
}

// What the rules of the CRD say of a service with this spec, beside its model.
func specRules(t *testing.T) func(spec map[string]any) string {
	t.Helper()
	structural := structuralSchema(t)
	rules := schemacel.NewValidator(structural, true, celconfig.PerCallLimit)
	return func(spec map[string]any) string {
		object := service(1).Object
		if _, given := spec["model"]; !given {
			source := map[string]any{"uri": "https://h/m.gguf", "sha256": strings.Repeat("a", 64)}
			spec["model"] = map[string]any{"servedName": "chat", "source": source}
		}
		object["spec"] = spec
		problems, _ := rules.Validate(context.Background(), nil, structural, object, nil, celconfig.RuntimeCELCostBudget)
		return fmt.Sprint(problems.ToAggregate())
	}
}

func TestWhatWouldBreakAPodIsRefused(t *testing.T) {
	rules := specRules(t)
	judge := func(pod string) string {
		var parsed map[string]any
		if err := yaml.Unmarshal([]byte(pod), &parsed); err != nil {
			t.Fatalf("%s: %v", pod, err)
		}
		// Numbers are int64 in the API server.
		object := &unstructured.Unstructured{}
		text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Pod", "pod": parsed})
		if err != nil {
			t.Fatal(err)
		}
		if err := object.UnmarshalJSON(text); err != nil {
			t.Fatal(err)
		}
		return rules(map[string]any{"pod": object.Object["pod"]})
	}
	mount := func(path string) string {
		return fmt.Sprintf("{volumes: [{name: v, emptyDir: {}}], volumeMounts: [{name: v, mountPath: %q}]}", path)
	}
	for _, pod := range []string{
		"{}",
		"{labels: {team: a, app.kubernetes.io/part-of: chat, empty: ''}, annotations: {a.b/c: any text}}",
		"{env: [{name: TZ, value: UTC}, {name: AWS_REGION}, {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]}",
		"{volumes: [{name: v, secret: {secretName: s}}, {name: w, projected: {sources: []}}, {name: d, downwardAPI: {items: []}}]}",
		"{modelVolumes: [{claimName: models.v2}], serviceAccountName: mine, priorityClassName: system-node-critical, runtimeClassName: nvidia}",
		"{securityContext: {runAsUser: 1000, runAsGroup: 0, supplementalGroups: [0, 7], seccompProfile: {type: Localhost, localhostProfile: p.json}}}",
		mount("/mnt/v"), mount("/models"), mount("/etc/pki/tls"), mount("/usrlocal"),
	} {
		if told := judge(pod); told != "<nil>" {
			t.Errorf("%s: %s", pod, told)
		}
	}
	for pod, says := range map[string]string{
		"{labels: {app.kubernetes.io/name: x}}":                               "select pods by them",
		"{labels: {gantry.dev/service: other}}":                               "select pods by them",
		"{labels: {team: a b}}":                                               "at most 63 letters",
		"{annotations: {gantry.dev/restart: now}}":                            "annotate the InferenceService",
		"{env: [{name: GANTRY_SERVICE, value: x}]}":                           "what the operator sets",
		"{env: [{name: 1A, value: x}]}":                                       "beginning with a letter",
		"{env: [{name: A, value: x, valueFrom: {fieldRef: {fieldPath: a}}}]}": "at most one of value and valueFrom",
		"{env: [{name: A, valueFrom: {}}]}":                                   "exactly one of secretKeyRef",
		"{volumes: [{name: v}]}":                                              "restricted allows no other",
		"{volumes: [{name: v, emptyDir: {}, secret: {secretName: s}}]}":       "exactly one of configMap",
		"{volumes: [{name: cache, emptyDir: {}}]}":                            "the server's own",
		"{volumes: [{name: gantry-x, emptyDir: {}}]}":                         "the server's own",
		"{volumes: [{name: V, emptyDir: {}}]}":                                "at most 63 lower-case",
		"{volumeMounts: [{name: v, mountPath: /mnt/v}]}":                      "one of spec.pod.volumes",
		"{modelVolumes: [{claimName: ../x}]}":                                 "name of a PersistentVolumeClaim",
		"{serviceAccountName: ''}":                                            "name of a ServiceAccount",
		"{priorityClassName: A}":                                              "name of a PriorityClass",
		"{runtimeClassName: a/b}":                                             "name of a RuntimeClass",
		"{imagePullSecrets: [{name: A}]}":                                     "name: use lower-case letters",
		"{securityContext: {runAsUser: 0}}":                                   "does not run as root",
		"{securityContext: {supplementalGroups: [-1]}}":                       "supplementalGroups: use numbers",
		"{securityContext: {seccompProfile: {type: Localhost}}}":              "localhostProfile with type Localhost",
	} {
		if told := judge(pod); !strings.Contains(told, says) {
			t.Errorf("%s: %q is expected, it says %s", pod, says, told)
		}
	}
	for path, says := range map[string]string{
		"/": "absolute path", "mnt": "absolute path", "/mnt/": "absolute path", "/mnt/../tmp": "absolute path", "//tmp": "absolute path", "/mnt/a:b": "absolute path",
		"/tmp": "would hide", "/tmp/x": "would hide", "/etc": "would hide", "/usr/share/x": "would hide", "/var": "would hide", "/var/lib/gantry/models/x": "would hide",
	} {
		if told := judge(mount(path)); !strings.Contains(told, says) {
			t.Errorf("%s: %q is expected, it says %s", path, says, told)
		}
	}
}

func TestAModelIsOnAClaimThatPodsHave(t *testing.T) {
	rules := specRules(t)
	source := func(claim string) map[string]any {
		return map[string]any{"pvc": map[string]any{"claimName": claim, "path": "a/m.gguf"}, "sha256": strings.Repeat("a", 64)}
	}
	judge := func(claims ...string) string {
		var volumes []any
		for _, claim := range claims {
			volumes = append(volumes, map[string]any{"claimName": claim})
		}
		return rules(map[string]any{
			"model": map[string]any{"servedName": "chat", "source": source("models")},
			"runtime": map[string]any{
				"contextSize": int64(8192), "parallel": int64(8), "threads": "auto",
				"speculative": map[string]any{"draft": source("drafts"), "maxTokens": int64(8)},
			},
			"pod": map[string]any{"modelVolumes": volumes},
		})
	}
	if told := judge("models", "drafts"); told != "<nil>" {
		t.Error(told)
	}
	for says, claims := range map[string][]string{
		"spec.model.source.pvc.claimName: name the claim":              {"drafts"},
		"spec.runtime.speculative.draft.pvc.claimName: name the claim": {"models"},
	} {
		if told := judge(claims...); !strings.Contains(told, says) || strings.Count(told, "name the claim") != 1 {
			t.Errorf("%v: %s", claims, told)
		}
	}
	if told := rules(map[string]any{"model": map[string]any{"servedName": "chat", "source": source("models")}}); !strings.Contains(told, "spec.pod.modelVolumes as well") {
		t.Error(told)
	}
}

// What the documentation shows passes the rules, and none of it is dropped for being unknown.
func TestTheExampleOfTheDocumentationIsTaken(t *testing.T) {
	text, err := os.ReadFile("../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(text), "\n## Where pods run, and what else they have\n")
	_, example, begins := strings.Cut(section, "```yaml\n")
	example, _, ends := strings.Cut(example, "```")
	if !found || !begins || !ends {
		t.Fatal("there is no example")
	}
	var spec map[string]any
	if err := yaml.Unmarshal([]byte(example), &spec); err != nil {
		t.Fatal(err)
	}
	object := &unstructured.Unstructured{}
	written, _ := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "InferenceService", "spec": spec})
	if err := object.UnmarshalJSON(written); err != nil {
		t.Fatal(err)
	}
	if told := specRules(t)(object.Object["spec"].(map[string]any)); told != "<nil>" {
		t.Error(told)
	}
	read := object.DeepCopy()
	structural := structuralSchema(t)
	pruned := pruning.PruneWithOptions(read.Object, structural, true, structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true})
	if len(pruned) > 0 {
		t.Errorf("unknown: %v", pruned)
	}
}

func TestVariablesOfAStoreComeFromItsFields(t *testing.T) {
	rules := specRules(t)
	pod := map[string]any{"env": []any{map[string]any{"name": "AWS_REGION", "value": "eu-central-1"}}}
	store := func(store map[string]any) map[string]any {
		return map[string]any{"responseStore": store}
	}
	claim := store(map[string]any{"pvc": map[string]any{"claimName": "shared"}})
	if told := rules(map[string]any{"pod": pod, "api": claim}); told != "<nil>" {
		t.Error(told)
	}
	bucket := store(map[string]any{"s3": map[string]any{"bucket": "responses"}})
	if told := rules(map[string]any{"pod": pod, "api": bucket}); !strings.Contains(told, "come from spec.api.responseStore.s3") {
		t.Error(told)
	}
}

// What the schema does not know is dropped, or refused where the client asks for that: a hostPath is no volume.
func TestAPodHasNoVolumeOfItsNode(t *testing.T) {
	crd := customResource(t, chart+"/files/crds/inferenceservices.gantry.dev.yaml")
	pod := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["pod"]
	volume := pod.Properties["volumes"].Items.Schema
	if volume.XPreserveUnknownFields != nil || len(volume.Properties) != 9 {
		t.Errorf("%v", volume.Properties)
	}
	for name := range volume.Properties {
		switch name {
		case "name", "configMap", "secret", "emptyDir", "projected", "persistentVolumeClaim", "csi", "ephemeral", "downwardAPI":
		default:
			t.Errorf("%s is none that restricted allows", name)
		}
	}
}

func TestAuthoritiesAreForAddressesOfHTTPS(t *testing.T) {
	rules := specRules(t)
	judge := func(uri, name string) string {
		ca := map[string]any{"configMapRef": map[string]any{"name": name}}
		source := map[string]any{"uri": uri, "sha256": strings.Repeat("a", 64), "ca": ca}
		return rules(map[string]any{"model": map[string]any{"servedName": "chat", "source": source}})
	}
	if told := judge("https://h/m.gguf", "internal-ca"); told != "<nil>" {
		t.Error(told)
	}
	for says, told := range map[string]string{
		"for what is asked over https://": judge("http://h/m.gguf", "internal-ca"),
		"name: use lower-case letters":    judge("https://h/m.gguf", "Internal CA"),
	} {
		if !strings.Contains(told, says) {
			t.Errorf("%q is expected, it says %s", says, told)
		}
	}
}

func TestMemoryThatNoPodServesWithIsRefused(t *testing.T) {
	rules := specRules(t)
	judge := func(memory string) string {
		return rules(map[string]any{"resources": map[string]any{"memory": memory}})
	}
	for _, memory := range []string{"64Mi", "1Gi", "68M", "24Gi", "1e9", "67108864"} {
		if told := judge(memory); told != "<nil>" {
			t.Errorf("%s: %s", memory, told)
		}
	}
	for _, memory := range []string{"1024", "24", "63Mi", "500m", "64M"} {
		if told := judge(memory); !strings.Contains(told, "give 64Mi or more, with a unit") {
			t.Errorf("%s: %s", memory, told)
		}
	}
	if told := rules(map[string]any{"resources": map[string]any{"cpu": "1"}}); told != "<nil>" {
		t.Errorf("no memory: %s", told)
	}
}

// Each step of a canary has a larger share than the one before, and none has nothing or all.
func TestSharesOfACanaryRise(t *testing.T) {
	rules := specRules(t)
	judge := func(strategy string, shares ...string) string {
		var steps []any
		for _, share := range shares {
			steps = append(steps, map[string]any{"share": share, "bake": "5m"})
		}
		rollout := map[string]any{"strategy": strategy, "gates": map[string]any{}, "drainTimeout": "120s", "canary": map[string]any{"steps": steps}}
		return rules(map[string]any{"rollout": rollout})
	}
	for _, good := range [][]string{{"5%"}, {"5%", "25%"}, {"0.5%", "1%", "5%", "9%", "10%", "25%", "50%", "99.9%"}} {
		for _, strategy := range []string{"Auto", "InPlaceSwap"} {
			if refused := judge(strategy, good...); refused != "<nil>" {
				t.Errorf("%s %v: %s", strategy, good, refused)
			}
		}
	}
	for _, bad := range []struct {
		strategy string
		shares   []string
		told     string
	}{
		{"Auto", []string{"25%", "5%"}, "a larger share than the one before"},
		{"Auto", []string{"9%", "10%", "10.0%"}, "a larger share than the one before"},
		{"Auto", []string{"0%"}, "more than 0% and less than 100%"},
		{"Auto", []string{"5%", "100%"}, "more than 0% and less than 100%"},
		{"Auto", []string{"5"}, "use a percentage"},
		{"BlueGreen", []string{"5%"}, "do not keep both in a pod"},
		{"HoldRequests", []string{"5%"}, "do not keep both in a pod"},
	} {
		if refused := judge(bad.strategy, bad.shares...); !strings.Contains(refused, bad.told) {
			t.Errorf("%s %v: %q", bad.strategy, bad.shares, refused)
		}
	}
}

func TestNamesThatNoObjectHasAreRefused(t *testing.T) {
	rules := specRules(t)
	source := func(name string) map[string]any {
		return map[string]any{"uri": "https://h/m.gguf", "sha256": strings.Repeat("a", 64), "secretRef": map[string]any{"name": name}}
	}
	fields := map[string]func(name string) map[string]any{
		"secretRef": func(name string) map[string]any {
			return map[string]any{"model": map[string]any{"servedName": "chat", "source": source(name)}}
		},
		"draft": func(name string) map[string]any {
			return map[string]any{"runtime": map[string]any{
				"contextSize": int64(8192), "parallel": int64(8), "threads": "auto",
				"speculative": map[string]any{"draft": source(name), "maxTokens": int64(8)},
			}}
		},
		"configMapRef": func(name string) map[string]any {
			prompts := map[string]any{"configMapRef": map[string]any{"name": name}, "minPass": "100%"}
			gates := map[string]any{"memory": map[string]any{"headroom": "5%"}, "prompts": prompts}
			return map[string]any{"rollout": map[string]any{"drainTimeout": "120s", "gates": gates}}
		},
	}
	for field, spec := range fields {
		for _, name := range []string{"hf", "hf-token.1", "0", strings.Repeat("a", 253)} {
			if told := rules(spec(name)); told != "<nil>" {
				t.Errorf("%s %s: %s", field, name, told)
			}
		}
		for _, name := range []string{"HF", "my secret", "a/b", "../x", "-a", "a-", "a..b", "a_b", "a\n", "a+Secret:b=absent"} {
			if told := rules(spec(name)); !strings.Contains(told, "name: use lower-case letters") {
				t.Errorf("%s %q: %s", field, name, told)
			}
		}
	}
}

func TestWhatIsToldOfAddressesNamesNoneThatIsNotFetched(t *testing.T) {
	rules := specRules(t)
	for _, uri := range []string{"gs://b/m.gguf", "azure://c/m.gguf", "file:///m.gguf", "ftp://h/m.gguf"} {
		source := map[string]any{"uri": uri, "sha256": strings.Repeat("a", 64)}
		told := rules(map[string]any{"model": map[string]any{"servedName": "chat", "source": source}})
		for _, scheme := range []string{"gs://", "azure://", "file://", "ftp://"} {
			// The value itself is repeated by the API server, here and there.
			if strings.Contains(strings.ReplaceAll(told, uri, ""), scheme) {
				t.Errorf("%s: %s", uri, told)
			}
		}
		if !strings.Contains(told, "https://, http://, hf://, s3:// and oci://") && !strings.Contains(told, "https://, http://, hf://, s3:// or oci://") {
			t.Errorf("%s: %s", uri, told)
		}
	}
}

func TestAddressesOfStoresAreThoseOfFiles(t *testing.T) {
	rules := specRules(t)
	judge := func(uri string, more map[string]any) string {
		source := map[string]any{"uri": uri, "sha256": strings.Repeat("a", 64)}
		for name, value := range more {
			source[name] = value
		}
		return rules(map[string]any{"model": map[string]any{"servedName": "chat", "source": source}})
	}
	digest := "@sha256:" + strings.Repeat("0a", 32)
	ca := map[string]any{"configMapRef": map[string]any{"name": "internal-ca"}}
	for uri, more := range map[string]map[string]any{
		"hf://org/repo/m.gguf":                    nil,
		"hf://org/repo@main/folder/m-Q4_K_M.gguf": {"ca": ca},
		"s3://bucket/folder/m.gguf":               {"endpoint": "https://minio.ns.svc:9000", "region": "eu-central-1", "ca": ca},
		"s3://my.bucket-1/m":                      {"endpoint": "http://minio:9000/base"},
		"oci://ghcr.io/org/models/m:v1":           nil,
		"oci://localhost:5000/m:v1" + digest:      {"endpoint": "http://registry.ns.svc:5000"},
		"https://h/m.gguf":                        nil,
	} {
		if told := judge(uri, more); told != "<nil>" {
			t.Errorf("%s: %s", uri, told)
		}
	}
	for _, wrong := range []struct {
		uri, says string
		more      map[string]any
	}{
		{"hf://repo/m.gguf", "use hf://owner/repository@revision", nil},
		{"hf://org/repo@/m.gguf", "use hf://owner/repository@revision", nil},
		{"s3://bucket", "use s3://bucket/path", nil},
		{"s3://b:1/m.gguf", "use s3://bucket/path", nil},
		{"oci://ghcr.io", "use oci://registry/repository:tag", nil},
		{"oci://ghcr.io/Org/m", "use oci://registry/repository:tag", nil},
		{"oci://ghcr.io/org/m@sha256:1", "use oci://registry/repository:tag", nil},
		{"s3://user:pass@b/m.gguf", "user and password", nil},
		{"https://h/m.gguf", "endpoint: it is for hf://", map[string]any{"endpoint": "https://h"}},
		{"hf://o/r/m.gguf", "region: it is for s3://", map[string]any{"region": "eu"}},
		{"s3://b/m.gguf", "region: use a name", map[string]any{"region": "EU"}},
		{"s3://b/m.gguf", "ca: it is for what is asked over https://", map[string]any{"endpoint": "http://h", "ca": ca}},
		{"s3://b/m.gguf", "endpoint: use an address like", map[string]any{"endpoint": "minio:9000"}},
		{"s3://b/m.gguf", "endpoint: use an address like", map[string]any{"endpoint": "https://u:p@h"}},
		{"s3://b/m.gguf", "endpoint: use an address like", map[string]any{"endpoint": "https://h?x=1"}},
	} {
		if told := judge(wrong.uri, wrong.more); !strings.Contains(told, wrong.says) {
			t.Errorf("%s: %q is expected, it says %s", wrong.uri, wrong.says, told)
		}
	}
}

func TestADigestMayBeLeftOutWhereTheAddressPinsTheFile(t *testing.T) {
	rules := specRules(t)
	commit, digest := strings.Repeat("0a", 20), strings.Repeat("0a", 32)
	for uri, pinned := range map[string]bool{
		"hf://org/repo@" + commit + "/m-00001-of-00002.gguf": true,
		"oci://ghcr.io/org/m:v1@sha256:" + digest:            true,
		"oci://ghcr.io/org/m@sha256:" + digest:               true,
		"hf://org/repo/m.gguf":                               false,
		"hf://org/repo@main/m.gguf":                          false,
		"hf://org/repo/" + commit + "/m.gguf":                false,
		"hf://org/repo@" + commit[1:] + "/m.gguf":            false,
		"oci://ghcr.io/org/m:v1":                             false,
		"s3://bucket/repo@" + commit + "/m.gguf":             false,
		"https://h/m.gguf":                                   false,
	} {
		source := map[string]any{"uri": uri}
		told := rules(map[string]any{"model": map[string]any{"servedName": "chat", "source": source}})
		if pinned && told != "<nil>" || !pinned && !strings.Contains(told, "give the file's SHA-256") {
			t.Errorf("%s: %s", uri, told)
		}
	}
}

func TestCredentialsInAddressesAreRefused(t *testing.T) {
	rules := specRules(t)
	judge := func(uri string) string {
		source := map[string]any{"uri": uri, "sha256": strings.Repeat("a", 64)}
		return rules(map[string]any{"model": map[string]any{"servedName": "chat", "source": source}})
	}
	for _, uri := range []string{
		"https://h/m.gguf", "https://h/m@2.gguf?download=true&to=a@b&design=1&author=a&tokenizer=t&max_tokens=5&config=1&oauth=no&v=1%2E0", "https://h/token=1/m.gguf",
		"https://h/R&D%20models;sig=1/m.gguf",
	} {
		if told := judge(uri); told != "<nil>" {
			t.Errorf("%s: %s", uri, told)
		}
	}
	// An @ in a path is no user.
	commit := "hf://org/repo@" + strings.Repeat("a", 40) + "/m.gguf"
	if told := judge(commit); told != "<nil>" {
		t.Errorf("%s: %s", commit, told)
	}
	for uri, says := range map[string]string{
		"https://user:pass@h/m.gguf": "user and password", "https://token@h/m.gguf": "user and password", "https:////u@h/m.gguf": "user and password",
		"https://\\u@h/m.gguf": "user and password", "https://h/m?X-Amz-Signature=1": "signatures and tokens", "https://h/m?a=1&SIG=1": "signatures and tokens",
		"https://h/m?a=1;token=": "signatures and tokens", "https://h/m?key=1": "signatures and tokens", "https://h/m?a=1&api-Key=1": "signatures and tokens",
		"https://h/m?JWT=1": "signatures and tokens", "https://h/m?client_secret=1": "signatures and tokens", "https://h/m?auth=1": "signatures and tokens",
		"https://h/m?refreshToken=1": "signatures and tokens", "https://h/m?a=1&sasToken=1": "signatures and tokens", "https://h/m?secretKey=1": "signatures and tokens",
		"https://h/m?%73ig=1": "percent-encoded", "https://h/m?a=1&t%6Fken=1": "percent-encoded", "https://h/R&D/m?a=1&t%6Fken=1": "percent-encoded", "https://h/m?a=1?sig=1": "signatures and tokens",
		"https://h/m.gguf#token=1": "what begins with #", "https://h/m?a=1#": "what begins with #",
	} {
		if told := judge(uri); !strings.Contains(told, says) {
			t.Errorf("%s: %q is expected, it says %q", uri, says, told)
		}
	}
}

func customResource(t *testing.T, file string) *apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.UnmarshalStrict(text, crd); err != nil {
		t.Fatal(err)
	}
	apiextensionsv1.SetDefaults_CustomResourceDefinition(crd)
	apiextensionsv1.SetDefaults_CustomResourceDefinitionSpec(&crd.Spec)
	return crd
}
